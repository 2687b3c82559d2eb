//! The bill of materials of an image: the crates in its program, and the packages of its other files.
//!
//! Without a time or a serial number, so that the same parts always give the same text.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use testbed::command_output;

use super::Platform;
use super::formatters::DebianPackage;
use crate::workspace::cargo;

/// Describes the image in the format of CycloneDX, which scanners find in an image by the end `.cdx.json` of a file's name.
///
/// *Source:* CycloneDX 1.6; the specification of package URLs.
pub(super) fn describe_image(
    program: &str,
    platform: Platform,
    packages: &BTreeSet<DebianPackage>,
) -> Result<String> {
    let arguments = ["tree", "--package", program, "--edges", "normal,no-proc-macro", "--prefix", "none"];
    let mut command = cargo(&arguments);
    command.args(["--target", &platform.target(), "--format", "{p}|{l}"]);
    let tree = command_output(&mut command)?;
    let crates = tree.lines().map(parse_crate).collect::<Result<BTreeSet<_>>>()?;
    let crates = crates.into_iter().map(|(name, version, license)| {
        let url = format!("pkg:cargo/{name}@{version}");
        let mut component = component(name, version, url);
        if !license.is_empty() {
            // The older form of an alternative.
            component["licenses"] = json!([{"expression": license.replace(" / ", "/").replace('/', " OR ")}]);
        }
        component
    });
    let packages = packages.iter().map(|DebianPackage { name, version }| {
        // A package URL keeps `+` for itself.
        let escaped = version.replace('+', "%2B").replace(':', "%3A");
        component(name, version, format!("pkg:deb/debian/{name}@{escaped}?arch={}", platform.architecture()))
    });
    let document = json!({
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": {
            "type": "container", "name": format!("nodekeel/{program}"), "version": env!("CARGO_PKG_VERSION"),
        }},
        "components": crates.chain(packages).collect::<Vec<_>>(),
    });
    serde_json::to_string_pretty(&document).context("write the bill of materials")
}

fn component(name: &str, version: &str, url: String) -> Value {
    json!({"type": "library", "name": name, "version": version, "bom-ref": &url, "purl": url})
}

/// The name, the version and the license of a line such as `libc v0.2.191|MIT OR Apache-2.0`; a directory or `(*)` may follow the
/// version.
fn parse_crate(line: &str) -> Result<(&str, &str, &str)> {
    let parse = || {
        let (package, rest) = line.split_once('|')?;
        let mut words = package.split(' ');
        let (name, version) = (words.next()?, words.next()?.strip_prefix('v')?);
        Some((name, version, rest.trim_end_matches(" (*)")))
    };
    parse().with_context(|| format!("parse {line:?} of cargo tree"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_its_crates_and_its_packages_are_described_once() {
        let platform = Platform::native().unwrap();
        let package = DebianPackage { name: "xfsprogs".into(), version: "6.1.0-1+b1".into() };
        let text = describe_image(super::super::PACKAGE, platform, &BTreeSet::from([package])).unwrap();
        let document: Value = serde_json::from_str(&text).unwrap();
        let components = document["components"].as_array().unwrap();
        let urls: Vec<&str> = components.iter().filter_map(|component| component["purl"].as_str()).collect();
        assert_eq!(urls.iter().collect::<BTreeSet<_>>().len(), components.len());
        let has = |start: &str| urls.iter().filter(|url| url.starts_with(start)).count();
        for part in ["pkg:cargo/nodekeel-provisioner@", "pkg:cargo/kube@", "pkg:cargo/libc@0."] {
            assert_eq!(has(part), 1, "{part} of {urls:?}");
        }
        // Only needed for the build.
        assert_eq!(has("pkg:cargo/syn@"), 0);
        let architecture = platform.architecture();
        assert!(urls.contains(&&*format!("pkg:deb/debian/xfsprogs@6.1.0-1%2Bb1?arch={architecture}")));
        let libc = components.iter().find(|component| component["name"] == "libc").unwrap();
        assert_eq!(libc["licenses"][0]["expression"], "MIT OR Apache-2.0");
    }

    #[test]
    fn a_line_that_is_no_crate_is_an_error_that_has_it() {
        let error = parse_crate("warning: none").unwrap_err();
        assert!(error.to_string().contains("warning: none"));
    }
}
