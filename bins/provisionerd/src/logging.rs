//! Logging to stderr.

use anyhow::{Context as _, Result};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, fmt};

use crate::config::{LogConfig, LogFormat};

/// Starts logging.
pub(crate) fn init_logging(log: &LogConfig) -> Result<()> {
    // kube logs every failed call, which this program reports once.
    let filter = EnvFilter::try_new(format!("kube_client::client::builder=off,{}", log.level))
        .with_context(|| format!("read the log level {:?}", log.level))?;
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    let layer = match log.format {
        LogFormat::Compact => lines.compact().boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(false).boxed(),
    };
    let subscriber = tracing_subscriber::registry().with(layer.with_filter(filter));
    tracing::subscriber::set_global_default(subscriber).context("start logging")
}
