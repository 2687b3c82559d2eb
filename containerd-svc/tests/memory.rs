//! Peak memory of an import, in a dedicated process without other work.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use nodekeel_containerd_svc::{ContainerdImages, ImageStore as _, Platform, Preseed};
use testbed::{Containerd, ScratchDir, command_output};

/// Size of the layer.
const MEBIBYTES: usize = 320;
/// *Source:* a goal of this project.
const LIMIT: u64 = 16 << 20;

/// Creates a docker-archive with one large layer, without holding it in this process.
fn create_archive(scratch: &Path) {
    let part: Vec<u8> = (0_u64..1 << 17)
        .flat_map(|number| (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number << 13).to_le_bytes())
        .collect();
    let layer = scratch.join("layer.tar");
    let mut file = File::create(&layer).unwrap();
    (0..MEBIBYTES).for_each(|_| file.write_all(&part).unwrap());
    let digest = command_output(Command::new("sha256sum").arg(&layer)).unwrap();
    let architecture = Platform::of_build_target().architecture;
    let config = serde_json::json!({"os": "linux", "architecture": architecture,
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", &digest[..64])]}});
    let saved =
        serde_json::json!([{"Config": "config.json", "RepoTags": ["large:1"], "Layers": ["layer.tar"]}]);
    fs::write(scratch.join("config.json"), config.to_string()).unwrap();
    fs::write(scratch.join("manifest.json"), saved.to_string()).unwrap();
    let directory = scratch.join("preseed/k8s.io");
    fs::create_dir_all(&directory).unwrap();
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(scratch).arg("-cf").arg(directory.join("large.tar"));
    command_output(tar.args(["layer.tar", "config.json", "manifest.json"])).unwrap();
    fs::remove_file(layer).unwrap();
}

/// *Source:* proc_pid_status(5).
fn process_status(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
    value.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// The peak growth of resident memory during this work.
fn peak_growth(work: impl FnOnce()) -> u64 {
    // *Source:* proc_pid_clear_refs(5): resets the peak to the current size.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = process_status("VmRSS");
    work();
    process_status("VmHWM").saturating_sub(before)
}

/// The same archive, raw or compressed, with the window and with the error that names it if it is rejected.
const ARCHIVES: [(&str, &[&str], u64, Option<&str>); 6] = [
    ("large.tar", &[], 0, None),
    ("large.tar.gz", &["gzip", "-1"], 0, None),
    ("large.tar.zst", &["zstd", "--quiet", "-1", "--long=24"], 16 << 20, None),
    // As RKE2 packs its images, and the most that is accepted by default.
    ("larger-window.tar.zst", &["zstd", "--quiet", "-1", "--long=25"], 32 << 20, None),
    ("largest-window.tar.zst", &["zstd", "--quiet", "-1", "--long=27"], 128 << 20, None),
    ("too-large-window.tar.zst", &["zstd", "--quiet", "-1", "--long=28"], 0, Some("zstd window")),
];

#[test]
#[ignore = "needs containerd and root"]
fn an_import_of_any_size_uses_bounded_memory() {
    let scratch = ScratchDir::new().unwrap();
    create_archive(scratch.path());
    let containerd = Containerd::start().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let images = runtime.block_on(ContainerdImages::connect(containerd.socket_path())).unwrap();
    let directory = scratch.path().join("preseed");
    let raw = scratch.path().join("raw.tar");
    fs::rename(directory.join("k8s.io/large.tar"), &raw).unwrap();
    for (file, compress, window, rejected) in ARCHIVES {
        fs::remove_dir_all(directory.join("k8s.io")).unwrap();
        fs::create_dir(directory.join("k8s.io")).unwrap();
        let bundle = directory.join("k8s.io").join(file);
        match compress {
            [] => fs::hard_link(&raw, &bundle).unwrap(),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg("--stdout").arg(&raw).stdout(File::create(&bundle).unwrap());
                assert!(command.status().unwrap().success());
            }
        }
        let mut report = None;
        let grown =
            peak_growth(|| report = Some(runtime.block_on(Preseed::new(&directory).run(&images)).unwrap()));
        println!("{MEBIBYTES} MiB as {file}: {:.1} MiB more at its peak", grown as f64 / f64::from(1 << 20));
        assert!(grown <= LIMIT + window, "{file}: {grown}");
        let failures = report.unwrap().failures();
        let listed = runtime.block_on(images.list_images(&"k8s.io".parse().unwrap())).unwrap();
        match rejected {
            None => assert_eq!((failures.len(), listed.len()), (0, 1), "{failures:?}"),
            Some(reason) => {
                assert!(failures[0].contains(file) && failures[0].contains(reason), "{failures:?}");
                assert_eq!(listed.len(), 0);
                continue;
            }
        }
        let mut ctr = containerd.ctr_command();
        let name = "docker.io/library/large:1";
        command_output(ctr.args(["--namespace", "k8s.io", "images", "rm", "--sync", name])).unwrap();
    }
}
