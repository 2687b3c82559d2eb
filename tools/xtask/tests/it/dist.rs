//! The Debian package, installed in a bare Debian.

use std::fs;
use std::process::Command;

use testbed::ScratchDir;

use crate::sources;

/// Installs the package $2 in the bare Debian $1, and runs the commands $3 there. Its mounts and processes end with it.
const INSIDE: &str = r#"
cp "$2" "$1/nodekeel.deb"
exec unshare --mount --pid --fork --kill-child --propagation private sh -euc '
    mount -t proc proc "$1/proc"
    mount --rbind /dev "$1/dev"
    exec chroot "$1" /bin/sh -euc "$2"
' sh "$1" "$3"
"#;

const COMMANDS: &str = r#"
export DEBIAN_FRONTEND=noninteractive
dpkg -i /nodekeel.deb
for file in /usr/bin/noded /usr/bin/nodectl /usr/bin/provisionerd /usr/bin/dirquota /etc/nodekeel/noded.toml \
    /usr/share/bash-completion/completions/nodectl /usr/share/doc/nodekeel/THIRD-PARTY; do
    test -s "$file" || { echo "$file is missing" >&2; exit 1; }
done
dpkg -L nodekeel | grep -q "man1/nodectl.1"
grep -q "^ExecStart=/usr/bin/noded run" "$(dpkg -L nodekeel | grep "noded.service$")"
cat >/etc/nodekeel/noded.toml <<CONFIG
services.etcd.enable = false
services.containerd.enable = false
kernel.log = false
[health]
min_free_percent = 0
warn_free_percent = 0
[[service]]
name = "hello"
command = ["/bin/sleep", "1000"]
CONFIG
noded check --config /etc/nodekeel/noded.toml
noded run --config /etc/nodekeel/noded.toml &
noded=$!
until [ -S /var/lib/nodekeel/run/control.sock ]; do kill -0 $noded; sleep 0.1; done
nodectl health --wait 60s
nodectl start --wait 60s hello
nodectl version
kill $noded
wait $noded
dpkg --purge nodekeel
test ! -e /usr/bin/noded
echo "the node ran and stopped"
"#;

#[test]
#[ignore = "needs debootstrap and root: it installs the package in a chroot"]
fn the_debian_package_installs_in_a_bare_debian_and_runs_a_node() {
    let scratch = ScratchDir::new().unwrap();
    let chroot = scratch.path().join("root");
    // The programs that were built with the tests; the files are those of a release.
    let words = ["dist", "--profile", "dev", "--no-build"];
    let built = Command::new(env!("CARGO_BIN_EXE_xtask")).args(words).output().unwrap();
    let shown = String::from_utf8_lossy(&built.stdout).into_owned();
    assert!(built.status.success(), "{shown}{}", String::from_utf8_lossy(&built.stderr));
    let deb = shown.lines().find(|line| line.ends_with(".deb")).expect("a package");
    assert!(
        shown.lines().any(|line| line.ends_with(".tar.gz") && fs::metadata(line).unwrap().len() > 1 << 20)
    );
    let release = fs::read_to_string("/etc/os-release").unwrap();
    let name = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME=")).expect("Debian");
    let bare = Command::new("debootstrap").args(["--variant=minbase", name]).arg(&chroot).output().unwrap();
    assert!(bare.status.success(), "{}", String::from_utf8_lossy(&bare.stdout));
    let mut install = Command::new("sh");
    install.args(["-euc", INSIDE, "sh"]).arg(&chroot).arg(deb).arg(COMMANDS).current_dir(sources::root());
    let ran = install.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && text.contains("the node ran and stopped"), "{text}");
}
