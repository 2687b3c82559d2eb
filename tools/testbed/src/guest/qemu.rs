//! QEMU's command line.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::kernel::GuestKernel;
use super::{GuestBuilder, PortForward, disk_path};
use crate::tools;

/// Speeds up an emulated guest: no mitigations, no self-tests, memory zeroed where it is used. A panic ends it at once.
const KERNEL_LINE: &str = "console=ttyS0 panic=-1 reboot=t mitigations=off nokaslr cryptomgr.notests init_on_alloc=0 quiet loglevel=5";
const MACHINE: [&str; 7] =
    ["-machine", "q35", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"];

/// What executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU's emulation, on any machine.
    Tcg,
}

impl Accelerator {
    /// QEMU's name of it, the processor, and words of the kernel's command line.
    ///
    /// With cx16, QEMU 7.2 now and then double-faults newer guests. What emulation would cost is left out: one thread
    /// executes all processors, as several need atomic instructions, which makes each guest take twice the time; string
    /// instructions are emulated byte by byte or word by word, and a kernel that copies without them (erms, and rep_good,
    /// which is 112) does so four times as fast; page tables have four levels (la57).
    fn options(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Kvm => ("kvm", "max,-cx16", ""),
            Self::Tcg => ("tcg,thread=single", "max,-cx16,-erms,-la57", " clearcpuid=112"),
        }
    }
}

/// The command that boots the guest; its console is the command's standard output.
pub(super) fn qemu_command(
    builder: &GuestBuilder,
    kernel: &GuestKernel,
    accelerator: Accelerator,
    directory: &Path,
) -> Result<Command> {
    let mut command = Command::new(tools::find_tool(tools::QEMU)?);
    add_machine(&mut command, kernel, accelerator);
    let modules = if builder.has_network { "virtio_net" } else { "" };
    add_kernel_line(&mut command, accelerator, &format!("NODEKEEL_MODULES={modules}"));
    command.args(["-smp", &builder.cpu_count.to_string(), "-m", &format!("{}M", builder.memory_bytes >> 20)]);
    add_drive(&mut command, "root", &directory.join("root"), DriveKind::ReadOnly);
    add_drive(&mut command, "modules", &kernel.modules, DriveKind::ReadOnly);
    // The guest counts its disks of each kind from zero.
    let mut counts = [0; 2];
    for (number, disk) in builder.disks.iter().enumerate() {
        let (name, kind) = match disk.is_4kn {
            false => ("disk", DriveKind::Disk),
            true => ("4kn", DriveKind::Disk4Kn),
        };
        let count = &mut counts[usize::from(disk.is_4kn)];
        add_drive(&mut command, &format!("{name}{count}"), &disk_path(directory, number), kind);
        *count += 1;
    }
    command.args(["-device", "virtio-serial-pci,max_ports=2"]);
    command
        .arg("-chardev")
        .arg(path_option("socket,id=control,server=on,wait=off,path=", &directory.join("control")));
    command.args(["-device", "virtserialport,chardev=control,nr=1,name=control"]);
    if builder.has_network {
        command.args(["-netdev", &network_option(&builder.forwards)]);
        command.args(["-device", "virtio-net-pci,netdev=network,romfile="]);
    }
    Ok(command)
}

/// A TPM 2.0 whose control channel listens at this path.
pub(super) fn add_tpm(command: &mut Command, socket: &Path) {
    command.arg("-chardev").arg(path_option("socket,id=tpm,path=", socket));
    command.args(["-tpmdev", "emulator,id=tpm,chardev=tpm", "-device", "tpm-crb,tpmdev=tpm"]);
}

/// The command that boots the kernel up to init.sh's first lines.
pub(super) fn probe_command(kernel: &GuestKernel, accelerator: Accelerator) -> Result<Command> {
    let mut command = Command::new(tools::find_tool(tools::QEMU)?);
    add_machine(&mut command, kernel, accelerator);
    add_kernel_line(&mut command, accelerator, "NODEKEEL_PROBE=1");
    command.args(["-smp", "2", "-m", "256M"]);
    Ok(command)
}

fn add_machine(command: &mut Command, kernel: &GuestKernel, accelerator: Accelerator) {
    let (name, processor, _) = accelerator.options();
    command.args(MACHINE).args(["-accel", name, "-cpu", processor]);
    command.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(&kernel.initramfs);
    // Without signal=off, QEMU would change the terminal's settings, and Ctrl-C would end it.
    command.args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
}

/// The words of every guest, and one for its first process.
fn add_kernel_line(command: &mut Command, accelerator: Accelerator, variable: &str) {
    let (.., words) = accelerator.options();
    command.args(["-append", &format!("{KERNEL_LINE}{words} {variable}")]);
}

/// What a drive is to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DriveKind {
    ReadOnly,
    Disk,
    /// With logical blocks of 4096 bytes.
    Disk4Kn,
}

/// A disk that the guest identifies by its serial number. Its writes needn't survive this machine: only the
/// guest is killed.
fn add_drive(command: &mut Command, serial: &str, file: &Path, kind: DriveKind) {
    let access = if kind == DriveKind::ReadOnly { "readonly=on" } else { "cache=unsafe,discard=unmap" };
    let id = format!("drive-{serial}");
    command.arg("-drive").arg(path_option(&format!("if=none,id={id},format=raw,{access},file="), file));
    let blocks =
        if kind == DriveKind::Disk4Kn { ",logical_block_size=4096,physical_block_size=4096" } else { "" };
    command.args(["-device", &format!("virtio-blk-pci,drive={id},serial={serial}{blocks}")]);
}

/// *Source:* qemu(1): a comma within a value is written twice.
fn path_option(before: &str, path: &Path) -> OsString {
    let mut text = OsString::from(before);
    text.push(path.to_string_lossy().replace(',', ",,"));
    text
}

fn network_option(forwards: &[PortForward]) -> String {
    let rules = forwards
        .iter()
        .map(|PortForward { host, guest }| format!(",hostfwd=tcp:{}:{}-:{guest}", host.ip(), host.port()));
    format!("user,id=network,ipv6=off{}", rules.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_a_path_end_no_option() {
        assert_eq!(path_option("file=", Path::new("/a,b")), OsString::from("file=/a,,b"));
    }
}
