//! Compiles the protos of the node's APIs with a compiler written in Rust, so that the client does not need protoc.

#![allow(
    clippy::disallowed_methods,
    reason = "cargo passes the features of a build script in the environment"
)]

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    const PROTOS: [&str; 2] = ["nodekeel/control/v1/control.proto", "nodekeel/node/v1/node.proto"];
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(PROTOS, ["proto"])?;
    tonic_prost_build::configure()
        .build_server(std::env::var_os("CARGO_FEATURE_NODE").is_some())
        // They contain secrets; `v1` has a Debug without them.
        .skip_debug([
            "nodekeel.control.v1.CreateGoldenTicketResponse",
            "nodekeel.control.v1.CreateJoinTicketResponse",
            "nodekeel.control.v1.RecoveryPassphrase",
            "nodekeel.node.v1.EnrolRequest",
            "nodekeel.node.v1.ReplaceUnlockKeysRequest",
            "nodekeel.node.v1.UnlockKeysResponse",
        ])
        .compile_fds(descriptors)?;
    Ok(())
}
