//! The keys of operators and nodes: no text makes the readers panic, and what they accept has one form.
#![no_main]

use nodekeel_node::access::{PrivateKey, PublicKey};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    if let Ok(text) = std::str::from_utf8(input)
        && let Ok(key) = text.parse::<PublicKey>()
    {
        assert_eq!(key.to_string(), text);
    }
    if let Ok(key) = PrivateKey::from_pem(input) {
        let again = PrivateKey::from_pem(key.to_pem().as_bytes()).expect("it was written by the library");
        assert_eq!(again.public_key(), key.public_key());
    }
});
