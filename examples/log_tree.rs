//! The log of a tree: leveled and raw entries, stored and read by DN, with the backlog and the live stream.
//!
//! `cargo run -p examples --example log_tree`

use nodekeel_logtree::{BacklogLimit, Dn, Level, LogQuery, LogStore, WriterOptions, parse, render};
use nodekeel_supervisor::{Context, Failure, OutputOrigin, Supervisor};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let log_store = LogStore::default();
    // The log store files each entry under the DN of its runnable, which the spans of the supervisor carry.
    tracing_subscriber::registry().with(log_store.layer()).init();

    let supervisor = start_tree(log_store.clone());
    let mut changes = supervisor.watch_changes();
    while supervisor.snapshot().iter().any(|node| node.state != nodekeel_supervisor::RunnableState::Ready) {
        changes.changed().await?;
    }

    write_daemon_lines(&log_store)?;
    println!("# backlog: everything below root");
    let mut reader =
        log_store.open_reader(LogQuery::of_dn("root".parse()?).include_descendants().follow())?;
    for entry in reader.read_backlog() {
        println!("{}", render::full_text(&entry));
    }
    println!("# live stream");
    let warning = log_store
        .open_reader(
            LogQuery::of_dn("root".parse()?).include_descendants().min_level(Level::Warn).last_entries(1),
        )?
        .read_backlog();
    supervisor.shutdown().await;
    log_store.append_message(
        &"root.disk".parse()?,
        nodekeel_logtree::LogMessage::new(Level::Error, "the disk has failed"),
    );
    while let Some(entry) = reader.next().await {
        println!("{}", render::full_text(&entry));
        if entry.dn.as_str() == "root.disk" {
            break;
        }
    }
    println!("# the newest warning before that, as JSON");
    for entry in warning {
        println!("{}", render::json_object(&entry));
    }
    let quiet = log_store
        .open_reader(LogQuery::of_dn("root.nobody".parse()?).backlog_limit(BacklogLimit::All))?
        .read_backlog();
    println!("# {} entries of a DN without output", quiet.len());
    Ok(())
}

/// A root with one runnable, whose output goes to the log store.
fn start_tree(log_store: LogStore) -> Supervisor {
    Supervisor::builder()
        .output_sink(move |origin: OutputOrigin<'_>| {
            let dn: Dn = origin.dn.parse().expect("a DN of the supervisor is valid in the log store");
            log_store
                .line_writer(&dn, WriterOptions::new(origin.stream.as_str()).generation(origin.generation))
        })
        .start(|ctx: Context| async move {
            ctx.run_child("disk", |ctx: Context| async move {
                tracing::info!(free = 17, "checked the disk");
                tracing::warn!("the disk is nearly full");
                use std::io::Write as _;
                writeln!(ctx.open_raw_output(), "a line without a level")?;
                ctx.signal_ready()?;
                Err::<(), Failure>(ctx.canceled().await.into())
            })?;
            ctx.signal_ready()?;
            tracing::info!("the root is ready");
            Err::<(), Failure>(ctx.canceled().await.into())
        })
}

/// Parses the log format of a daemon into levels; a line that can't be parsed stays raw.
fn write_daemon_lines(log_store: &LogStore) -> anyhow::Result<()> {
    let apiserver: Dn = "root.apiserver".parse()?;
    let mut writer =
        log_store.line_writer(&apiserver, WriterOptions::new("stderr").line_parser(parse::klog_line));
    std::io::Write::write_all(
        &mut writer,
        b"E1121 11:00:00.000001       1 server.go:42] no certificate\nplain text\n",
    )?;
    Ok(())
}
