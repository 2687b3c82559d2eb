//! Reading commands and programs out of documents.

use anyhow::{Context as _, Result};

/// The commands of the document's `sh` blocks up to the first that has this word.
///
/// # Errors
/// No command has it.
pub(super) fn commands_until(text: &str, last: &str) -> Result<Vec<String>> {
    let mut commands = shell_commands(text);
    let end = commands.iter().position(|line| line.split_whitespace().any(|word| word == last));
    commands.truncate(
        1 + end.with_context(|| format!("find the command {last:?} among {}", commands.join(", ")))?,
    );
    Ok(commands)
}

/// The commands of the document's `sh` blocks, a line each, without comments.
pub(super) fn shell_commands(text: &str) -> Vec<String> {
    let blocks = blocks(text, "sh");
    let lines = blocks.iter().flat_map(|block| block.lines());
    let commands = lines.map(|line| line.split(" #").next().unwrap_or(line).trim());
    commands.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

/// The first program in the documentation of a library: a block with `fn main`.
pub(super) fn first_program(source: &str) -> Option<String> {
    let docs = source.lines().map_while(|line| line.strip_prefix("//!"));
    let text: String = docs.map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(line))).collect();
    let rust = ["", "no_run", "rust", "rust,no_run"].into_iter().flat_map(|language| blocks(&text, language));
    rust.into_iter().find(|block| block.contains("fn main("))
}

/// The contents of the fenced blocks with exactly this language.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut block: Option<(bool, String)> = None;
    for line in text.lines() {
        match (&mut block, line.trim_start().strip_prefix("```")) {
            (None, Some(tag)) => block = Some((tag.trim() == language, String::new())),
            (Some(_), Some(_)) => {
                found.extend(block.take().filter(|(is_meant, _)| *is_meant).map(|(_, text)| text))
            }
            (Some((_, text)), None) => text.extend([line, "\n"]),
            (None, None) => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_lose_their_comments_and_other_blocks_are_skipped() {
        let text = "```sh\ncargo add a   # not yet\n\n# why\ncargo run\n```\n```toml\na = 1\n```\n";
        assert_eq!(shell_commands(text), ["cargo add a", "cargo run"]);
        assert_eq!(commands_until(text, "add").unwrap(), ["cargo add a"]);
        assert_eq!(commands_until(text, "run").unwrap().len(), 2);
        assert!(commands_until(text, "ru").unwrap_err().to_string().contains("cargo add a, cargo run"));
    }

    #[test]
    fn the_first_block_with_main_is_the_program() {
        let source = "//! A crate.\n//! ```text\n//! fn main() drawn\n//! ```\n//!\n//! ```no_run\n//! fn main() {\n//!     run();\n//! }\n//! ```\nmod a;\n";
        assert_eq!(first_program(source).as_deref(), Some("fn main() {\n    run();\n}\n"));
    }
}
