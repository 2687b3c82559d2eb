//! `images verify` and `images repair`: compare images with their digests.

use clap::Args;
use nodekeel_node::v1;
use serde::Serialize;

use crate::api_client::ApiClient;
use crate::error::CommandError;
use crate::output::{Printer, escape_control};

#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    /// Images; all without a name
    names: Vec<String>,
    /// containerd namespace
    #[arg(long, default_value = "k8s.io")]
    namespace: String,
}

#[derive(Debug, Serialize)]
struct VerificationView {
    images: u64,
    bytes: u64,
    damaged: Vec<DamagedView>,
    not_compared: Vec<UncomparedView>,
}

#[derive(Debug, Serialize)]
struct DamagedView {
    name: String,
    reason: String,
    repaired: bool,
}

#[derive(Debug, Serialize)]
struct UncomparedView {
    name: String,
    reason: String,
}

impl VerifyArgs {
    pub(super) async fn run(
        self,
        repair: bool,
        api: &mut ApiClient,
        printer: &mut Printer,
    ) -> Result<(), CommandError> {
        let Self { names, namespace } = self;
        let request = v1::VerifyImagesRequest { namespace, names, repair };
        let mut reports = api.follow_stream(async |client| client.verify_images(request).await).await?;
        let progress = printer.progress_line();
        let last = loop {
            let report = reports.next_message().await?.ok_or(CommandError::ConnectionLost)?;
            let is_complete = report.state == "complete";
            progress.show(&if is_complete { String::new() } else { describe_progress(&report) });
            if is_complete {
                break report;
            }
        };
        let damaged = last.damaged.into_iter().map(|image| DamagedView {
            name: image.name,
            reason: image.reason,
            repaired: image.repaired,
        });
        let not_compared = last.not_compared.into_iter();
        let not_compared =
            not_compared.map(|image| UncomparedView { name: image.name, reason: image.reason });
        let view = VerificationView {
            images: last.images,
            bytes: last.total_bytes,
            damaged: damaged.collect(),
            not_compared: not_compared.collect(),
        };
        printer.print_result(&view, &describe(&view))?;
        match view.not_compared.is_empty() && view.damaged.iter().all(|image| image.repaired) {
            true => Ok(()),
            false => Err(CommandError::NotHealthy),
        }
    }
}

fn describe_progress(report: &v1::ImageVerification) -> String {
    let percent = u128::from(report.done_bytes) * 100 / u128::from(report.total_bytes.max(1));
    format!(
        "{} {} images: {percent} %, {} damaged",
        escape_control(&report.state),
        report.images,
        report.damaged.len()
    )
}

fn describe(view: &VerificationView) -> String {
    let mut text = format!("{} images, {:.1} MB compared: ", view.images, view.bytes as f64 / 1e6);
    match (view.damaged.len(), view.not_compared.len()) {
        (0, 0) => text += "all are intact",
        (damaged, 0) => text += &format!("{damaged} damaged"),
        (damaged, rest) => text += &format!("{damaged} damaged, {rest} not compared completely"),
    }
    for DamagedView { name, reason, repaired } in &view.damaged {
        let repaired = if *repaired { ": repaired" } else { "" };
        text += &format!("\n{}: {}{repaired}", escape_control(name), escape_control(reason));
    }
    for UncomparedView { name, reason } in &view.not_compared {
        text += &format!("\n{}: not compared: {}", escape_control(name), escape_control(reason));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comparison_names_each_damaged_image_and_whether_it_is_repaired() {
        let (damaged, not_compared) = (Vec::new(), Vec::new());
        let mut view = VerificationView { images: 2, bytes: 1_500_000, damaged, not_compared };
        assert_eq!(describe(&view), "2 images, 1.5 MB compared: all are intact");
        for (name, repaired) in [("a:1", true), ("b:1", false)] {
            view.damaged.push(DamagedView {
                name: name.into(),
                reason: "its content is damaged".into(),
                repaired,
            });
        }
        let text = describe(&view);
        let lines: Vec<_> = text.lines().skip(1).collect();
        assert_eq!(lines, ["a:1: its content is damaged: repaired", "b:1: its content is damaged"]);
        view.not_compared.push(UncomparedView { name: "c:1".into(), reason: "no space".into() });
        let text = describe(&view);
        assert!(text.starts_with("2 images, 1.5 MB compared: 2 damaged, 1 not compared completely\n"));
        assert!(text.ends_with("\nc:1: not compared: no space"), "{text}");
    }
}
