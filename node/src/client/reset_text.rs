//! The plan of a reset, as nodectl and noded print it.

use crate::v1::ResetResponse;

/// The plan or the result of a reset: a heading for each kind of lines, for people.
pub fn describe_reset(reset: &ResetResponse) -> Vec<String> {
    let removes = match (reset.removes.is_empty(), reset.is_done) {
        (true, _) => "nothing to reset",
        (false, false) => "a reset removes:",
        (false, true) => "removed:",
    };
    let section = |heading: &str, lines: &[String]| {
        let lines = lines.iter().map(|line| format!("  {line}"));
        std::iter::once(heading.to_owned()).chain(lines).collect::<Vec<_>>()
    };
    let mut text = section(removes, &reset.removes);
    for (heading, lines) in [("keeps:", &reset.keeps), ("note:", &reset.notes)] {
        if !lines.is_empty() {
            text.extend(section(heading, lines));
        }
    }
    text
}
