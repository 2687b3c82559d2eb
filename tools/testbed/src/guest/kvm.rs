//! Whether a guest boots on this machine's KVM.

use std::fs::{self, File, OpenOptions};
use std::os::unix::process::CommandExt as _;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::kernel::GuestKernel;
use super::qemu::{self, Accelerator};
use crate::{ScratchDir, cache, end_group, leftovers, wait_exit};

const DEVICE: &str = "/dev/kvm";
/// What init.sh writes when it is probed.
const REACHED: &str = "nodekeel: user space was reached";
/// With KVM a kernel boots in a second; one that doesn't boot may hang.
const WITHIN: Duration = Duration::from_secs(20);

/// KVM where a guest has booted on it, else emulation. A device that can be opened proves little: some
/// kernels hang in nested virtualisation. The result is kept, for this machine's kernel and the guest's.
pub(super) fn choose_accelerator(kernel: &GuestKernel) -> Result<Accelerator> {
    if OpenOptions::new().read(true).write(true).open(DEVICE).is_err() {
        return Ok(Accelerator::Tcg);
    }
    let host = rustix::system::uname();
    let name = format!("kvm-{}-for-{}", host.release().to_string_lossy(), kernel.name);
    let verdict = cache::make_entry(&name, |directory| {
        let is_reached = boots_with_kvm(kernel)?;
        fs::write(directory.join("works"), if is_reached { "yes" } else { "no" })
            .context("write the result of the KVM probe")
    })?;
    let text = fs::read_to_string(verdict.join("works"));
    let text = text.with_context(|| format!("read {}", verdict.display()))?;
    Ok(if text == "yes" { Accelerator::Kvm } else { Accelerator::Tcg })
}

fn boots_with_kvm(kernel: &GuestKernel) -> Result<bool> {
    let scratch = ScratchDir::new()?;
    let path = scratch.path().join("console");
    let console = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    let mut command = qemu::probe_command(kernel, Accelerator::Kvm)?;
    command.stdin(Stdio::null()).stdout(console).stderr(Stdio::null()).process_group(0);
    let mut child = command.env(leftovers::MARK, scratch.path()).spawn().context("execute QEMU")?;
    if wait_exit(&mut child, WITHIN)?.is_none() {
        end_group(&mut child)?;
    }
    let said = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    Ok(String::from_utf8_lossy(&said).contains(REACHED))
}
