//! `images`: those of the node's containerd.

use std::time::Duration;

use nodekeel_node::v1::{ImagesRequest, ImportImagesRequest};

use crate::caller::Caller;
use crate::cli::ImagesArgs;
use crate::failure::Failure;
use crate::model::Image;
use crate::out::{Out, Tone, safe};

/// How long an import may take: some gigabytes on a slow disk.
const IMPORT: Duration = Duration::from_secs(30 * 60);

pub(crate) async fn run(caller: &mut Caller, args: ImagesArgs, out: &mut Out) -> Result<(), Failure> {
    let ImagesArgs { namespace, import } = args;
    let answer = match import {
        None => caller.ask(async |client| client.images(ImagesRequest { namespace }).await).await?,
        Some(file) => {
            let path = std::path::absolute(&file).map_err(|source| Failure::File { path: file, source })?;
            let request = ImportImagesRequest { namespace, path: path.display().to_string() };
            caller.be_patient(IMPORT);
            caller.ask(async |client| client.import_images(request).await).await?
        }
    };
    let images: Vec<_> = answer.images.into_iter().map(Image::from).collect();
    if out.json {
        return Ok(out.json(&images)?);
    }
    let width = images.iter().map(|image| image.name.chars().count()).max().unwrap_or_default().max(4);
    let header = out.paint(Tone::Strong, &format!("{:width$}  DIGEST", "NAME"));
    out.line(&header)?;
    for image in &images {
        out.line(&format!("{:width$}  {}", safe(&image.name), safe(&image.digest)))?;
    }
    Ok(())
}
