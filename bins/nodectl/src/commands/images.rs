//! `images`: images of the node's containerd.

use std::path::PathBuf;
use std::time::Duration;

use nodekeel_node::v1::{Image, ImagesRequest, ImportImagesRequest, LeftOutImage};
use serde::Serialize;

use crate::api_client::ApiClient;
use crate::error::CommandError;
use crate::output::{Printer, TextStyle, escape_control};

/// Timeout of an import: some gigabytes on a slow disk.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// List images of containerd, or import an archive
#[derive(Debug, clap::Args)]
pub(crate) struct ImagesArgs {
    /// containerd namespace
    #[arg(long, default_value = "k8s.io")]
    namespace: String,
    /// Import an archive, and list its images
    ///
    /// An OCI layout or a docker-archive, raw, gzip or zstd.
    #[arg(long, value_name = "FILE")]
    import: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct ImageView {
    name: String,
    digest: String,
    media_type: String,
}

impl From<Image> for ImageView {
    fn from(image: Image) -> Self {
        Self { name: image.name, digest: image.digest, media_type: image.media_type }
    }
}

impl ImagesArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        let Self { namespace, import } = self;
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
        print_images(printer, &images, &foreign)?;
        match faults.is_empty() {
            true => Ok(()),
            // The others are imported, and listed above.
            false => Err(CommandError::ImagesLeftOut {
                images: faults.into_iter().map(|(_, text)| text).collect(),
            }),
        }
    }
}

fn print_images(
    printer: &mut Printer,
    images: &[ImageView],
    foreign: &[(bool, String)],
) -> Result<(), CommandError> {
    if printer.is_json {
        return Ok(printer.print_json(&images)?);
    }
    let row = |image: &ImageView| [escape_control(&image.name), escape_control(&image.digest)];
    let rows: Vec<_> = images.iter().map(|image| (TextStyle::Plain, row(image))).collect();
    printer.print_table(["NAME", "DIGEST"], &rows)?;
    for (_, text) in foreign {
        printer.print_line(&format!("not for this node: {text}"))?;
    }
    Ok(())
}
