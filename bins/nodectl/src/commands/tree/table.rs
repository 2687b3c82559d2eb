//! The tree as a table, as wide and as high as a terminal.

use std::collections::BTreeMap;
use std::time::SystemTime;

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use crate::output::{TextStyle, escape_control};
use crate::runnable::{RunnableView, health_summary, state_style};
use crate::time::{format_age, format_duration};

/// Minimum width of the last column: the columns before it are left out to make it as wide.
const MIN_REASON_WIDTH: usize = 30;

/// The limits of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TableSize {
    /// Maximum width of a line, in columns of a terminal.
    pub(crate) columns: usize,
    /// Maximum number of lines.
    pub(crate) lines: usize,
}

impl TableSize {
    /// Of an output that is not a terminal.
    pub(crate) const UNLIMITED: Self = Self { columns: usize::MAX, lines: usize::MAX };
}

/// When the table is drawn, and whether it will be drawn again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TableTime {
    /// Once: the table is of the moment in which the node reported the tree.
    Once,
    /// Until the next change: an age would become wrong.
    UntilChange,
    /// Every second: ages and waits move on.
    EverySecond,
}

/// The widths of the columns; 0 leaves a column out.
struct ColumnWidths {
    name: usize,
    since: usize,
    restarts: usize,
    reason: usize,
}

/// The lines of the table: a header, the runnables, a summary. Where not all of them fit, those that are not
/// healthy and their parents come first.
pub(crate) fn table_lines(
    nodes: &[RunnableView],
    size: TableSize,
    time: TableTime,
    style: impl Fn(TextStyle, &str) -> String,
) -> Vec<String> {
    // The header and the summary take the other two lines.
    let shown = fitting_nodes(nodes, size.lines.saturating_sub(2));
    let hidden = nodes.len() - shown.len();
    let drawn = draw_tree(&shown);
    let widths = column_widths(&drawn, size.columns);
    let row = |name: &str, state: &str, since: &str, restarts: &str, reason: &str| {
        let mut line = format!("{:width$}  {state}", cut_text(name, widths.name), width = widths.name);
        if widths.since > 0 {
            line += &format!("  {since:9}");
        }
        if widths.restarts > 0 {
            line += &format!("  {restarts:>8}");
        }
        format!("{line}  {}", cut_text(reason, widths.reason)).trim_end().to_owned()
    };
    let header = row("NAME", &format!("{:8}", "STATE"), "SINCE", "RESTARTS", "WHY NOT READY");
    let mut lines = vec![style(TextStyle::Strong, &cut_text(&header, size.columns))];
    for (label, node) in &drawn {
        // The state is padded before it is styled: escape sequences would count as characters.
        let state = style(state_style(node.state), &format!("{:8}", node.state));
        let reason = not_ready_reason(node, time);
        lines.push(row(label, &state, &since_text(node, time), &node.restarts.to_string(), &reason));
    }
    let (summary, summary_style) = health_summary(nodes);
    let hidden = if hidden > 0 { format!("; {hidden} not shown") } else { String::new() };
    lines.push(style(summary_style, &cut_text(&format!("{summary}{hidden}"), size.columns)));
    lines
}

/// As many runnables as fit, in their order.
fn fitting_nodes(nodes: &[RunnableView], max: usize) -> Vec<&RunnableView> {
    let leads_to_trouble = |node: &RunnableView| {
        let below = |other: &RunnableView| {
            other.dn.strip_prefix(&node.dn).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        nodes.iter().any(|other| !other.healthy && below(other))
    };
    let is_first: Vec<bool> = nodes.iter().map(leads_to_trouble).collect();
    // The troubled runnables and their parents take their lines first. The others get those that are left.
    let mut others = max.saturating_sub(is_first.iter().filter(|is_first| **is_first).count());
    let mut fits = |is_first: bool| {
        let room = is_first || others > 0;
        others = others.saturating_sub(usize::from(!is_first));
        room
    };
    let chosen = nodes.iter().zip(is_first).filter(|(_, is_first)| fits(*is_first)).map(|(node, _)| node);
    chosen.take(max).collect()
}

fn column_widths(drawn: &[(String, &RunnableView)], columns: usize) -> ColumnWidths {
    const STATE: usize = 2 + 8;
    // The column is at least as wide as its header, NAME.
    let longest = drawn.iter().map(|(label, _)| label.width()).max().unwrap_or(0).max(4);
    let name = longest.min(columns / 2).min(columns.saturating_sub(STATE));
    let mut widths = ColumnWidths { name, since: 2 + 9, restarts: 2 + 8, reason: 0 };
    let left = |widths: &ColumnWidths| {
        columns.saturating_sub(widths.name + STATE + widths.since + widths.restarts + 2)
    };
    // The restarts are left out first, then the age: the reason helps most.
    if left(&widths) < MIN_REASON_WIDTH {
        widths.restarts = 0;
    }
    if left(&widths) < MIN_REASON_WIDTH {
        widths.since = 0;
    }
    widths.reason = left(&widths);
    widths
}

/// The start of a text that is wider than this number of columns.
fn cut_text(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    // The ellipsis takes one column.
    let mut left = width.saturating_sub(1);
    let fits = |c: &char| {
        let columns = c.width().unwrap_or(0);
        let fits = columns <= left;
        left = left.saturating_sub(columns);
        fits
    };
    let mut cut: String = text.chars().take_while(fits).collect();
    cut.extend((width > 0).then_some('…'));
    cut
}

fn since_text(node: &RunnableView, time: TableTime) -> String {
    match (time, node.since_time, &node.since) {
        // The time of day in the text of RFC 3339.
        (TableTime::UntilChange, _, Some(since)) => since[11..19].to_owned(),
        (_, Some(since), _) => format_age(since),
        _ => String::new(),
    }
}

/// The reason why a runnable is not ready, or counts as failing, with its last exit if that is the reason.
fn not_ready_reason(node: &RunnableView, time: TableTime) -> String {
    let waits = match (time, node.backoff_end) {
        (TableTime::EverySecond, Some(end)) => {
            let left = end.duration_since(SystemTime::now()).unwrap_or_default();
            format!("its backoff, {} more", format_duration(left))
        }
        _ => escape_control(node.waiting_for.as_deref().unwrap_or_default()),
    };
    let failed = matches!(node.state, "dead" | "waiting") || node.crash_looping;
    let ended = node.exits.last().filter(|_| failed).map(|exit| shorten_reason(&exit.reason));
    let parts = [Some(waits), node.crash_loop_text(), ended].into_iter().flatten();
    parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
}

/// The start of a reason, which can be long.
fn shorten_reason(reason: &str) -> String {
    const CHARS: usize = 60;
    // The table has one line for each runnable.
    let line = escape_control(reason.lines().next().unwrap_or_default());
    match line.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// The runnables in tree order, with their branch lines.
fn draw_tree<'a>(nodes: &[&'a RunnableView]) -> Vec<(String, &'a RunnableView)> {
    let mut children: BTreeMap<&str, Vec<&RunnableView>> = BTreeMap::new();
    let mut tops = Vec::new();
    for &node in nodes {
        // A runnable whose parent is not shown starts a tree of its own.
        match node.dn.rsplit_once('.').filter(|(parent, _)| nodes.iter().any(|other| other.dn == *parent)) {
            Some((parent, _)) => children.entry(parent).or_default().push(node),
            None => tops.push(node),
        }
    }
    let mut drawn = Vec::new();
    for top in tops {
        drawn.push((top.dn.clone(), top));
        draw_children(top, "", &children, &mut drawn);
    }
    drawn
}

fn draw_children<'a>(
    parent: &RunnableView,
    indent: &str,
    children: &BTreeMap<&str, Vec<&'a RunnableView>>,
    drawn: &mut Vec<(String, &'a RunnableView)>,
) {
    let below = children.get(parent.dn.as_str()).map_or(&[][..], Vec::as_slice);
    for (index, child) in below.iter().enumerate() {
        let (branch, trunk) =
            if index + 1 == below.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        let name = child.dn.rsplit('.').next().unwrap_or_default();
        drawn.push((format!("{indent}{branch}{name}"), child));
        draw_children(child, &format!("{indent}{trunk}"), children, drawn);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nodekeel_node::v1;

    use super::*;

    fn ready(dn: &str) -> v1::Node {
        v1::Node { dn: dn.into(), state: v1::State::Ready.into(), ..Default::default() }
    }

    fn failing(dn: &str, reason: &str) -> v1::Node {
        let exits = vec![v1::Exit { reason: reason.into(), ..Default::default() }];
        let until = SystemTime::now() + Duration::from_secs(3599);
        v1::Node {
            state: v1::State::Waiting.into(),
            waiting_for: "its backoff, 2.5 s more".into(),
            backoff_until: Some(until.into()),
            failures: 2,
            exits,
            ..ready(dn)
        }
    }

    fn lines(nodes: Vec<v1::Node>, size: (usize, usize), time: TableTime) -> Vec<String> {
        let nodes: Vec<_> = nodes.into_iter().map(RunnableView::from).collect();
        table_lines(&nodes, TableSize { columns: size.0, lines: size.1 }, time, |_, text| text.to_owned())
    }

    #[test]
    fn the_reason_names_the_last_exit_of_failed_runnables_only() {
        let reason = |state: v1::State, failures, reason: &str| {
            let node =
                v1::Node { state: state.into(), failures, backoff_until: None, ..failing("a", reason) };
            not_ready_reason(&RunnableView::from(node), TableTime::Once)
        };
        assert_eq!(
            reason(v1::State::Waiting, 2, "exited with code 3\nmore"),
            "its backoff, 2.5 s more; crash-loops: 2 consecutive failures; exited with code 3"
        );
        assert_eq!(reason(v1::State::New, 0, "exited with code 3"), "its backoff, 2.5 s more");
        assert_eq!(
            reason(v1::State::Dead, 1, &"x".repeat(61)),
            format!("its backoff, 2.5 s more; {}...", "x".repeat(60))
        );
    }

    #[test]
    fn children_are_drawn_below_their_parents() {
        let nodes = ["root", "root.a", "root.a.x", "root.a.x.y", "root.b", "root.a.z", "lost.child"]
            .map(|dn| RunnableView::from(ready(dn)));
        let labels: Vec<_> =
            draw_tree(&nodes.iter().collect::<Vec<_>>()).into_iter().map(|(label, _)| label).collect();
        assert_eq!(labels, ["root", "├─ a", "│  ├─ x", "│  │  └─ y", "│  └─ z", "└─ b", "lost.child"]);
    }

    #[test]
    fn every_line_fits_the_width_and_no_cell_is_wrapped() {
        let long =
            "a reason that is much longer than any terminal is wide, 世界世界世界世界世界世界".repeat(4);
        let nodes = || vec![ready("root"), ready("root.service"), failing("root.service.web", &long)];
        for columns in 10..200 {
            for line in lines(nodes(), (columns, 40), TableTime::EverySecond) {
                assert!(line.width() <= columns, "{columns}: {line}");
            }
        }
        let narrow = lines(nodes(), (60, 40), TableTime::EverySecond);
        assert_eq!(narrow[0], "NAME        STATE     WHY NOT READY");
        assert!(narrow[3].starts_with("   └─ web   waiting   its backoff, 59m5"), "{narrow:#?}");
    }

    #[test]
    fn a_wait_moves_on_where_the_tree_is_drawn_every_second() {
        let reason = |time| lines(vec![failing("root", "x")], (200, 9), time)[1].clone();
        assert!(reason(TableTime::EverySecond).contains("its backoff, 59m5"));
        assert!(reason(TableTime::UntilChange).contains("its backoff, 2.5 s more"));
    }

    #[test]
    fn what_is_not_healthy_is_shown_first_where_not_all_lines_fit() {
        let mut nodes = vec![ready("root"), ready("root.quiet"), ready("root.service")];
        nodes.extend((0..20).map(|number| ready(&format!("root.service.quiet-{number}"))));
        nodes.extend([failing("root.service.web", "x"), ready("root.service.last")]);
        let shown = lines(nodes.clone(), (100, 7), TableTime::Once);
        let names: Vec<_> = shown.iter().map(|line| line.split("  ").next().unwrap_or_default()).collect();
        assert_eq!(names[1..5], ["root", "├─ quiet", "└─ service", ""]);
        assert!(shown[4].contains("├─ quiet-0") && shown[5].contains("└─ web"), "{shown:#?}");
        assert_eq!(shown[6], "1 of 25 runnables is not healthy; 20 not shown");
        for max in 0..30 {
            assert!(lines(nodes.clone(), (100, max), TableTime::Once).len() <= max.max(2));
        }
        assert_eq!(lines(vec![ready("root")], (100, 9), TableTime::Once)[2], "all 1 runnables are ready");
    }
}
