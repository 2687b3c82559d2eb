//! The log of a tree: leveled and raw entries by name, read back by name, with a backlog and what comes after it.
//!
//! `cargo run -p examples --example log_tree`

use nodekeel_logtree::{Backlog, Dn, Journal, Level, Query, WriterOptions, parse, render};
use nodekeel_supervisor::{Context, Failure, Origin, Supervisor};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let journal = Journal::default();
    // Whatever is logged inside a runnable is filed under its name: the supervisor's spans carry it.
    tracing_subscriber::registry().with(journal.layer()).init();

    let supervisor = tree(journal.clone());
    let mut changes = supervisor.watch();
    while supervisor.snapshot().iter().any(|node| node.state != nodekeel_supervisor::State::Ready) {
        changes.changed().await?;
    }

    write_daemons_lines(&journal)?;
    println!("# everything below root, as it was written");
    let mut reader = journal.read(Query::new("root".parse()?).children().follow())?;
    for entry in reader.backlog() {
        println!("{}", render::full(&entry));
    }
    println!("# what comes after that");
    let warning =
        journal.read(Query::new("root".parse()?).children().min_level(Level::Warn).last(1))?.backlog();
    supervisor.shutdown().await;
    journal.append(&"root.disk".parse()?, nodekeel_logtree::Message::new(Level::Error, "the disk is gone"));
    while let Some(entry) = reader.next().await {
        println!("{}", render::full(&entry));
        if entry.dn.as_str() == "root.disk" {
            break;
        }
    }
    println!("# the newest warning before that, for programs");
    for entry in warning {
        println!("{}", render::json(&entry));
    }
    let quiet = journal.read(Query::new("root.nobody".parse()?).backlog(Backlog::All))?.backlog();
    println!("# {} entries of a name that has logged nothing", quiet.len());
    Ok(())
}

/// A root with one runnable, whose output goes to the journal.
fn tree(journal: Journal) -> Supervisor {
    Supervisor::builder()
        .output(move |origin: Origin<'_>| {
            let dn: Dn = origin.dn.parse().expect("a DN of the supervisor is one of the journal");
            journal.writer(&dn, WriterOptions::new(origin.stream.as_str()).generation(origin.generation))
        })
        .start(|ctx: Context| async move {
            ctx.run("disk", |ctx: Context| async move {
                tracing::info!(free = 17, "looked at the disk");
                tracing::warn!("it is nearly full");
                use std::io::Write as _;
                writeln!(ctx.raw(), "a line that nobody gave a level")?;
                ctx.ready()?;
                Err::<(), Failure>(ctx.cancelled().await.into())
            })?;
            ctx.ready()?;
            tracing::info!("the root is ready");
            Err::<(), Failure>(ctx.cancelled().await.into())
        })
}

/// A daemon's own format becomes levels again, and stays raw where it can't be parsed.
fn write_daemons_lines(journal: &Journal) -> anyhow::Result<()> {
    let apiserver: Dn = "root.apiserver".parse()?;
    let mut writer = journal.writer(&apiserver, WriterOptions::new("stderr").parser(parse::klog));
    std::io::Write::write_all(
        &mut writer,
        b"E1121 11:00:00.000001       1 server.go:42] no certificate\nplain text\n",
    )?;
    Ok(())
}
