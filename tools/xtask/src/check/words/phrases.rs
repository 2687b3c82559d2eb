//! Phrases that hide who acts, or that the field says otherwise.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::visit_mut::{self, VisitMut};

use super::names::is_test;

/// A phrase and what to write instead, a line each, separated by a tab.
const PHRASES: &str = include_str!("phrases.tsv");
/// The second phrase, continued like this, is allowed.
const FREE: &str = "is no longer";

/// A phrase where it stands.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Phrase {
    path: PathBuf,
    line: usize,
    phrase: &'static str,
    advice: &'static str,
    text: String,
}

impl fmt::Display for Phrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, line, phrase, advice, text } = self;
        write!(f, "{}:{line}: {phrase:?}: {advice}: {}", path.display(), text.trim())
    }
}

fn phrases() -> impl Iterator<Item = (&'static str, &'static str)> {
    PHRASES.lines().filter_map(|line| line.split_once('\t'))
}

/// How often each phrase was found, those that were not as well.
pub(crate) fn counts(found: &[Phrase]) -> BTreeMap<&'static str, usize> {
    let count = |phrase| found.iter().filter(|at| at.phrase == phrase).count();
    phrases().map(|(phrase, _)| (phrase, count(phrase))).collect()
}

/// The phrases of a document, outside its blocks of code.
pub(crate) fn in_document(path: &Path, text: &str) -> Vec<Phrase> {
    let mut is_code = false;
    let lines = text.lines().enumerate().filter(|(_, line)| {
        is_code ^= line.trim_start().starts_with("```");
        !is_code
    });
    in_lines(path, lines.map(|(index, line)| (index + 1, line.to_owned())))
}

/// The phrases of a source's comments and string literals, outside its tests.
pub(crate) fn in_source(path: &Path, file: &syn::File, text: &str) -> Vec<Phrase> {
    let mut product = file.clone();
    WithoutTests.visit_file_mut(&mut product);
    let mut literals = Vec::new();
    collect_literals(product.to_token_stream(), &mut literals);
    let tests = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
    let comments = text[..tests].lines().enumerate().filter_map(|(index, line)| {
        let comment = line.trim_start();
        // Doc comments are literals of the parsed file.
        let is_plain =
            comment.starts_with("//") && !comment.starts_with("///") && !comment.starts_with("//!");
        is_plain.then(|| (index + 1, comment.to_owned()))
    });
    in_lines(path, literals.into_iter().chain(comments))
}

struct WithoutTests;

impl VisitMut for WithoutTests {
    fn visit_file_mut(&mut self, file: &mut syn::File) {
        file.items.retain(|item| !is_test(attributes(item)));
        visit_mut::visit_file_mut(self, file);
    }

    fn visit_item_mod_mut(&mut self, item: &mut syn::ItemMod) {
        if let Some((_, items)) = &mut item.content {
            items.retain(|item| !is_test(attributes(item)));
        }
        visit_mut::visit_item_mod_mut(self, item);
    }
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        _ => &[],
    }
}

fn collect_literals(tokens: TokenStream, literals: &mut Vec<(usize, String)>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => collect_literals(group.stream(), literals),
            TokenTree::Literal(literal) => {
                let start = literal.span().start().line;
                let text = literal.to_string();
                if text.contains('"') {
                    literals
                        .extend(text.lines().enumerate().map(|(line, text)| (start + line, text.to_owned())));
                }
            }
            TokenTree::Ident(_) | TokenTree::Punct(_) => {}
        }
    }
}

fn in_lines(path: &Path, lines: impl Iterator<Item = (usize, String)>) -> Vec<Phrase> {
    let mut found = Vec::new();
    for (line, text) in lines {
        let lower = text.to_lowercase().replace(FREE, "");
        for (phrase, advice) in phrases() {
            if contains_words(&lower, phrase) {
                found.push(Phrase { path: path.to_owned(), line, phrase, advice, text: text.clone() });
            }
        }
    }
    found
}

/// Whether `phrase` stands in `text` as whole words.
fn contains_words(text: &str, phrase: &str) -> bool {
    let is_border = |letter: Option<char>| !letter.is_some_and(char::is_alphanumeric);
    text.match_indices(phrase).any(|(at, _)| {
        is_border(text[..at].chars().next_back()) && is_border(text[at + phrase.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_words_count() {
        assert!(contains_words("it is no path", "is no") && contains_words("is no", "is no"));
        assert!(!contains_words("it is not a path", "is no") && !contains_words("he is nobody", "is no"));
    }

    #[test]
    fn a_document_counts_by_line_and_its_code_does_not() {
        let found = in_document(Path::new("a.md"), "It is no path.\n```sh\nwhoever\n```\nHe was told.\n");
        let places: Vec<_> = found.iter().map(|phrase| (phrase.line, phrase.phrase)).collect();
        assert_eq!(places, [(1, "is no"), (5, "told")]);
    }
}
