//! `tree`: all runnables with their states.

mod table;

use std::time::Duration;

use nodekeel_node::v1::TreeRequest;
use tokio::signal::unix::{SignalKind, signal};

use self::table::{TableSize, TableTime, table_lines};
use crate::api_client::ApiClient;
use crate::error::CommandError;
use crate::output::Printer;
use crate::runnable::RunnableView;

/// The interval in which a terminal shows the durations of waits and states.
const REDRAW_INTERVAL: Duration = Duration::from_secs(1);

/// List all runnables with their states
#[derive(Debug, clap::Args)]
pub(crate) struct TreeArgs {
    /// Print the tree again whenever it changes
    #[arg(short, long)]
    watch: bool,
}

impl TreeArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        if self.watch { watch_tree(api, printer).await } else { show_tree(api, printer).await }
    }
}

async fn show_tree(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let nodes = tree_views(api.call(async |client| client.tree(TreeRequest {}).await).await?.nodes);
    print_tree(&nodes, printer, TableTime::Once)
}

async fn watch_tree(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let mut trees = api.follow_stream(async |client| client.watch_tree(TreeRequest {}).await).await?;
    let mut resized = signal(SignalKind::window_change())?;
    let mut nodes = Vec::new();
    loop {
        // Before the first tree there is nothing to draw again.
        let draws = printer.draws_on_terminal() && !nodes.is_empty();
        tokio::select! {
            tree = trees.next_message() => match tree? {
                Some(tree) => nodes = tree_views(tree.nodes),
                None => return Ok(()),
            },
            // A new size of the terminal shows another part of the same tree.
            _ = resized.recv(), if draws => {}
            // Ages and waits move on without a change of the tree.
            () = tokio::time::sleep(REDRAW_INTERVAL), if draws => {}
        }
        if printer.draws_on_terminal() {
            draw_screen(&nodes, printer)?;
        } else {
            print_tree(&nodes, printer, TableTime::UntilChange)?;
            // An empty line separates the trees.
            if !printer.is_json {
                printer.print_line("")?;
            }
        }
        printer.flush()?;
    }
}

pub(crate) fn tree_views(nodes: Vec<nodekeel_node::v1::Node>) -> Vec<RunnableView> {
    nodes.into_iter().map(RunnableView::from).collect()
}

fn print_tree(nodes: &[RunnableView], printer: &mut Printer, time: TableTime) -> Result<(), CommandError> {
    if printer.is_json {
        return Ok(printer.print_json(&nodes)?);
    }
    // On a terminal, a longer line would be wrapped below its column; `status` has the whole reason.
    let columns = printer.terminal_size().filter(|_| printer.draws_on_terminal()).map(|(columns, _)| columns);
    let size = TableSize { columns: columns.unwrap_or(usize::MAX), ..TableSize::UNLIMITED };
    for line in table_lines(nodes, size, time, |style, text| printer.style_text(style, text)) {
        printer.print_line(&line)?;
    }
    Ok(())
}

/// Draws the part of the tree that fits the terminal; the cursor stays in the last line.
fn draw_screen(nodes: &[RunnableView], printer: &mut Printer) -> Result<(), CommandError> {
    let size = printer
        .terminal_size()
        // One line is left for the cursor: a newline in the last line would scroll the screen.
        .map_or(TableSize::UNLIMITED, |(columns, rows)| TableSize { columns, lines: rows.saturating_sub(1) });
    let style = |style, text: &str| printer.style_text(style, text);
    let lines = table_lines(nodes, size, TableTime::EverySecond, style);
    Ok(printer.draw_lines(&lines)?)
}
