//! See `nodekeel_localstorage::testing::fuzz_tree_stream`. Run it as root, as the receiver does.
#![no_main]

use std::sync::OnceLock;

use nodekeel_localstorage::{Dir, testing::fuzz_tree_stream};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    static SCRATCH: OnceLock<Dir> = OnceLock::new();
    let scratch = SCRATCH.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("nodekeel-fuzz-{}", std::process::id()));
        std::fs::create_dir(&path).expect("a new directory");
        Dir::open(&path).expect("the directory")
    });
    fuzz_tree_stream(scratch, input);
});
