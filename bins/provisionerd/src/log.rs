//! The log, to stderr.

use anyhow::{Context as _, Result};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, fmt};

use crate::config::{Format, Log};

/// Logs from now on.
pub(crate) fn start(log: &Log) -> Result<()> {
    // kube's own line for each failed call would say again what ours says once.
    let filter = EnvFilter::try_new(format!("kube_client::client::builder=off,{}", log.level))
        .with_context(|| format!("read the log level {:?}", log.level))?;
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    let layer = match log.format {
        Format::Compact => lines.compact().boxed(),
        Format::Json => lines.json().flatten_event(true).with_current_span(false).boxed(),
    };
    let subscriber = tracing_subscriber::registry().with(layer.with_filter(filter));
    tracing::subscriber::set_global_default(subscriber).context("log")
}
