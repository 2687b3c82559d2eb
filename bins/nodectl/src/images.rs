//! `images`: images of the node's containerd.

use std::time::Duration;

use nodekeel_node::v1::{ImagesRequest, ImportImagesRequest};

use crate::api_client::ApiClient;
use crate::cli::ImagesArgs;
use crate::command_error::CommandError;
use crate::model::ImageView;
use crate::output::{Printer, TextStyle, escape_control};

/// Timeout of an import: some gigabytes on a slow disk.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

pub(crate) async fn show_images(
    api: &mut ApiClient,
    args: ImagesArgs,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    let ImagesArgs { namespace, import } = args;
    let answer = match import {
        None => api.call(async |client| client.images(ImagesRequest { namespace }).await).await?,
        Some(file) => {
            let path =
                std::path::absolute(&file).map_err(|source| CommandError::File { path: file, source })?;
            let request = ImportImagesRequest { namespace, path: path.display().to_string() };
            api.raise_timeout(IMPORT_TIMEOUT);
            api.call(async |client| client.import_images(request).await).await?
        }
    };
    let images: Vec<_> = answer.images.into_iter().map(ImageView::from).collect();
    if printer.is_json {
        return Ok(printer.print_json(&images)?);
    }
    let width = images.iter().map(|image| image.name.chars().count()).max().unwrap_or_default().max(4);
    let header = printer.style_text(TextStyle::Strong, &format!("{:width$}  DIGEST", "NAME"));
    printer.print_line(&header)?;
    for image in &images {
        printer.print_line(&format!(
            "{:width$}  {}",
            escape_control(&image.name),
            escape_control(&image.digest)
        ))?;
    }
    Ok(())
}
