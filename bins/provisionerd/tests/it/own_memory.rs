//! The token in the memory of provisionerd.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use testbed::reserve_port;

use crate::cluster::TIMEOUT;

#[test]
fn provisionerd_writes_no_core_unless_asked() {
    let kubeconfig = crate::messages::unreachable_kubeconfig();
    let directory = tempfile::tempdir().expect("a directory");
    for keeps_cores in [false, true] {
        let port = reserve_port().expect("a port");
        let listen = format!("--listen={}", port.socket_address());
        let mut command = Command::new("/bin/sh");
        let script = "ulimit -c unlimited && exec \"$0\" \"$@\"";
        command.args(["-c", script, env!("CARGO_BIN_EXE_provisionerd"), "agent", &listen, "--kubeconfig"]);
        command.arg(kubeconfig.path()).current_dir(directory.path());
        command.env_clear().env("NODEKEEL_CORE_DUMPS", u8::from(keeps_cores).to_string());
        command.stdin(Stdio::null()).stderr(Stdio::null());
        let mut running = command.spawn().expect("the agent starts");
        let connect = || Ok(std::net::TcpStream::connect(port.socket_address())?);
        let listening = testbed::wait_until(TIMEOUT, "the agent to listen", connect);
        kill_process(Pid::from_child(&running), Signal::ABORT).expect("it runs");
        let status = running.wait().expect("it has ended");
        listening.expect("it has listened");
        assert_eq!((status.signal(), status.core_dumped()), (Some(6), keeps_cores));
    }
}
