//! What the sources of the libraries may not contain.

use std::path::Path;

use crate::layers::LIBRARIES;
use crate::sources::{self, Source, root};

/// The uses of `unsafe` outside a `sys.rs`: a crate has one, beside what it serves.
fn misplaced_unsafe(source: &Source) -> Vec<String> {
    if source.path.ends_with("sys.rs") {
        return Vec::new();
    }
    // In two pieces, or this line would be one.
    let words = ["{", "fn ", "impl ", "extern "].map(|rest| format!("{} {rest}", "unsafe"));
    places(source, &words)
}

/// What a library does that only a program may do.
fn manners_of_a_program(source: &Source) -> Vec<String> {
    const WORDS: [&str; 8] = [
        "println!(",
        "print!(",
        "dbg!(",
        "env::var",
        "env::args",
        "env::current_dir",
        "env::temp_dir",
        "process::exit(",
    ];
    places(source, &WORDS.map(String::from))
}

fn places(source: &Source, words: &[String]) -> Vec<String> {
    let found = source.code().filter(|(_, line)| words.iter().any(|word| line.contains(word.as_str())));
    found.map(|(number, line)| format!("{}:{number}: {}", source.path.display(), line.trim())).collect()
}

#[test]
fn unsafe_code_is_only_in_sys() {
    let found: Vec<String> = sources::below(".").iter().flat_map(misplaced_unsafe).collect();
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn libraries_neither_print_nor_read_the_environment() {
    let present = LIBRARIES.into_iter().filter(|library| root().join(library).exists());
    let files: Vec<Source> = present.flat_map(|library| sources::below(&format!("{library}/src"))).collect();
    assert!(files.len() > 10, "the libraries were read");
    let code = files.iter().filter(|file| !is_test(&file.path));
    let found: Vec<String> = code.flat_map(manners_of_a_program).collect();
    assert_eq!(found, Vec::<String>::new());
}

/// Whether the file holds tests alone: `foo_test.rs`, beside `foo.rs`.
fn is_test(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("_test"))
}

#[test]
fn planted_violations_are_found() {
    let planted = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
    let code = format!(
        "fn a() {{\n    {} {{ b() }}\n    eprintln!(\"x\");\n    std::env::var(\"X\");\n}}",
        "unsafe"
    );
    assert_eq!(misplaced_unsafe(&planted("a/src/b.rs", &code)).len(), 1);
    assert_eq!(misplaced_unsafe(&planted("a/src/sys.rs", &code)), Vec::<String>::new());
    assert_eq!(manners_of_a_program(&planted("a/src/b.rs", &code)).len(), 2);
    let harmless = "//! println!(\"in an example\");\nmod tests {\n    println!(\"in a test\");\n}";
    assert_eq!(manners_of_a_program(&planted("a/src/b.rs", harmless)), Vec::<String>::new());
}
