//! `images`: images of the node's containerd.

mod verify;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use nodekeel_node::v1::{Image, ImagesRequest, ImportImagesRequest, LeftOutImage};
use serde::Serialize;

use self::verify::VerifyArgs;
use crate::api_client::ApiClient;
use crate::error::CommandError;
use crate::output::{Printer, TextStyle, escape_control};
use crate::time::{format_age, format_rfc3339};
use crate::wire::{non_empty, system_time};

/// Timeout of an import: some gigabytes on a slow disk.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// List images with states, or import an archive
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ImagesArgs {
    #[command(subcommand)]
    command: Option<ImagesCommand>,
    /// containerd namespace
    #[arg(long, default_value = "k8s.io")]
    namespace: String,
    /// Import an archive, and list its images
    ///
    /// An OCI layout or a docker-archive, raw, gzip or zstd.
    #[arg(long, value_name = "FILE")]
    import: Option<PathBuf>,
    /// Print the list again whenever it changes
    #[arg(short, long, conflicts_with = "import")]
    watch: bool,
}

#[derive(Debug, clap::Subcommand)]
enum ImagesCommand {
    /// Compare images with their digests
    ///
    /// All of their content is read, and the files of unpacked layers are counted. Exits with 6 if an image is damaged.
    Verify(VerifyArgs),
    /// Compare images, and write what is damaged again
    ///
    /// Unpacked layers are compared byte by byte. Damaged content comes from the archives of services.containerd.preseed, and damaged
    /// unpacked layers are unpacked again; one that a container uses is named instead. Exits with 6 if an image is still damaged.
    Repair(VerifyArgs),
}

#[derive(Debug, Serialize)]
struct ImageView {
    name: Option<String>,
    digest: Option<String>,
    media_type: Option<String>,
    size_bytes: Option<u64>,
    pinned: bool,
    bundle: Option<String>,
    /// The directory of the bundle; `None` from a node of an earlier release, too.
    directory: Option<String>,
    /// `None` from a node of an earlier release, and of images that were just imported.
    state: Option<String>,
    since: Option<String>,
    unpacked: bool,
    problem: Option<String>,
    /// While its archive is read.
    import_done_bytes: Option<u64>,
    import_total_bytes: Option<u64>,
    /// The reason why the last comparison has not looked at all of it.
    not_compared: Option<String>,
    #[serde(skip)]
    age: Option<String>,
}

impl From<Image> for ImageView {
    fn from(image: Image) -> Self {
        let since = system_time(image.since);
        Self {
            name: non_empty(image.name),
            digest: non_empty(image.digest),
            media_type: non_empty(image.media_type),
            size_bytes: image.size_bytes,
            pinned: image.pinned,
            bundle: non_empty(image.bundle),
            directory: non_empty(image.directory),
            state: non_empty(image.state),
            since: since.map(format_rfc3339),
            unpacked: image.unpacked,
            problem: non_empty(image.problem),
            import_done_bytes: image.import_done_bytes,
            import_total_bytes: image.import_total_bytes,
            not_compared: non_empty(image.not_compared),
            age: since.map(format_age),
        }
    }
}

impl ImagesArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        let Self { command, namespace, import, watch } = self;
        match command {
            Some(ImagesCommand::Verify(args)) => return args.run(false, api, printer).await,
            Some(ImagesCommand::Repair(args)) => return args.run(true, api, printer).await,
            None if watch => return watch_images(namespace, api, printer).await,
            None => {}
        }
        let answer = match import {
            None => api.call(async |client| client.images(ImagesRequest { namespace }).await).await?,
            Some(file) => {
                // noded opens the file, and has another working directory.
                let path =
                    std::path::absolute(&file).map_err(|source| CommandError::File { path: file, source })?;
                let request = ImportImagesRequest { namespace, path: path.display().to_string() };
                api.raise_timeout(IMPORT_TIMEOUT);
                api.call(async |client| client.import_images(request).await).await?
            }
        };
        let describe = |image: LeftOutImage| {
            (image.is_fault, format!("{}: {}", escape_control(&image.name), escape_control(&image.reason)))
        };
        let (faults, foreign): (Vec<_>, Vec<_>) =
            answer.left_out.into_iter().map(describe).partition(|(is_fault, _)| *is_fault);
        let images: Vec<_> = answer.images.into_iter().map(ImageView::from).collect();
        print_images(printer, &images, &foreign, answer.verified_bytes.zip(answer.verify_bytes))?;
        match faults.is_empty() {
            true => Ok(()),
            // The others are imported, and listed above.
            false => Err(CommandError::ImagesLeftOut {
                images: faults.into_iter().map(|(_, text)| text).collect(),
            }),
        }
    }
}

/// Prints the list until the node stops or the caller ends it.
async fn watch_images(
    namespace: String,
    api: &mut ApiClient,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let request = ImagesRequest { namespace };
    let mut lists = api.follow_stream(async |client| client.watch_images(request).await).await?;
    while let Some(list) = lists.next_message().await? {
        let images: Vec<_> = list.images.into_iter().map(ImageView::from).collect();
        // A terminal shows the newest one alone.
        printer.begin_screen()?;
        print_images(printer, &images, &[], list.verified_bytes.zip(list.verify_bytes))?;
        // An empty line separates the lists.
        if !printer.is_json {
            printer.print_line("")?;
        }
        printer.flush()?;
    }
    Ok(())
}

fn print_images(
    printer: &mut Printer,
    images: &[ImageView],
    foreign: &[(bool, String)],
    compared: Option<(u64, u64)>,
) -> Result<(), CommandError> {
    if printer.is_json {
        return Ok(printer.print_json(&images)?);
    }
    let text = |text: &Option<String>| text.as_deref().map_or_else(|| "-".to_owned(), escape_control);
    // Where all are in one directory, the configuration names it.
    let directories: BTreeSet<_> = images.iter().filter_map(|image| image.directory.as_ref()).collect();
    let bundle = |image: &ImageView| match &image.directory {
        Some(directory) if directories.len() > 1 => {
            format!("{} in {}", text(&image.bundle), escape_control(directory))
        }
        _ => text(&image.bundle),
    };
    let row = |image: &ImageView| {
        let pinned = if image.pinned { "yes" } else { "no" };
        let size =
            image.size_bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{:.1} MB", bytes as f64 / 1e6));
        let (state, age) = (describe_state(image), text(&image.age));
        [text(&image.name), state, age, size, pinned.into(), bundle(image), text(&image.digest)]
    };
    let style = |image: &ImageView| match &image.problem {
        Some(_) => TextStyle::Bad,
        None if image.state.as_deref() == Some("wanted") || image.not_compared.is_some() => {
            TextStyle::Pending
        }
        None => TextStyle::Plain,
    };
    let rows: Vec<_> = images.iter().map(|image| (style(image), row(image))).collect();
    printer.print_table(["NAME", "STATE", "SINCE", "SIZE", "PINNED", "BUNDLE", "DIGEST"], &rows)?;
    for image in images {
        if let Some(problem) = &image.problem {
            let name = if image.name.is_some() { &image.name } else { &image.bundle };
            printer.print_line(&format!("{}: {}", text(name), escape_control(problem)))?;
        }
    }
    for image in images {
        if let Some(reason) = &image.not_compared {
            printer.print_line(&format!(
                "{}: not compared: {}",
                text(&image.name),
                escape_control(reason)
            ))?;
        }
    }
    for (_, text) in foreign {
        printer.print_line(&format!("not for this node: {text}"))?;
    }
    if let Some((done, all)) = compared {
        let percent = u128::from(done) * 100 / u128::from(all.max(1));
        printer.print_line(&format!(
            "after a power cut, noded compares the images with their digests: {percent} %"
        ))?;
    }
    Ok(())
}

/// The state, and how much of the archive is read.
fn describe_state(image: &ImageView) -> String {
    let state = image.state.as_deref().map_or_else(|| "-".to_owned(), escape_control);
    match image.import_done_bytes.zip(image.import_total_bytes) {
        Some((done, total)) => format!("{state}, {:.1} of {:.1} MB", done as f64 / 1e6, total as f64 / 1e6),
        None => state,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_shows_how_much_of_the_archive_is_read() {
        let image = |import_done_bytes: Option<u64>| {
            let total = import_done_bytes.map(|_| 500_000_000);
            Image { state: "wanted".into(), import_done_bytes, import_total_bytes: total, ..Image::default() }
        };
        assert_eq!(describe_state(&image(None).into()), "wanted");
        assert_eq!(describe_state(&image(Some(12_340_000)).into()), "wanted, 12.3 of 500.0 MB");
    }
}
