use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;

use super::*;
use crate::{leftovers, reserve_port, wait_until};

const SOON: Duration = Duration::from_secs(60);

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

fn lines(guest: &Guest, command: &Command) -> (i32, Vec<String>) {
    let mut lines = Vec::new();
    let code = guest.run_command(command, SOON, |line| lines.push(line.to_owned())).unwrap();
    (code, lines)
}

#[test]
#[ignore = "needs qemu-system-x86"]
fn a_guest_runs_commands_concurrently_kills_them_at_their_deadlines_and_leaves_nothing() {
    let guest = Guest::builder().add_text("/etc/it's", 0o640, "text\n").boot().unwrap();
    assert_eq!(lines(&guest, &shell("exit 7")), (7, vec![]));
    assert_eq!(lines(&guest, &shell("kill -s KILL $$")).0, 128 + 9);
    assert_eq!(lines(&guest, &Command::new("no-such-program")).0, 127);
    let mixed = "echo a; echo; echo ' b ' >&2; printf 'no end'; sleep 1000 & exit 3";
    assert_eq!(lines(&guest, &shell(mixed)), (3, ["a", "", " b ", "no end"].map(String::from).to_vec()));
    let mut command = shell(r#"echo "$A" "$(pwd)" $(stat -c '%a %u' "/etc/it's")"#);
    command.env("A", "it's $b").current_dir("/usr/lib");
    assert_eq!(guest.command_output(&command, SOON).unwrap(), "it's $b /usr/lib 640 0\n");
    let error = guest.command_output(&shell("echo not so; exit 1"), SOON).unwrap_err();
    assert!(error.to_string().contains("not so"), "{error}");

    let waiting = guest
        .start_command(&shell("mkfifo /run/f; echo ready; read -r word </run/f; echo $word; exit 5"))
        .unwrap();
    waiting.wait_for_line("ready", SOON).unwrap();
    let hanging = shell("echo last words >/dev/console; sleep 2000");
    let error = format!("{:#}", guest.run_command(&hanging, Duration::from_secs(10), |_| ()).unwrap_err());
    assert!(error.contains("last words") && error.contains("still ran after 10s"), "{error}");
    wait_until(SOON, "the hanging command's end", || {
        let processes = guest.command_output(&Command::new("ps"), SOON)?;
        ensure!(!processes.contains("sleep 2000"), "{processes}");
        Ok(())
    })
    .unwrap();
    guest.command_output(&shell("echo word >/run/f"), SOON).unwrap();
    let mut said = Vec::new();
    assert_eq!(waiting.wait_for_exit(SOON, |line| said.push(line.to_owned())).unwrap(), 5);
    assert_eq!(said, ["word"]);
    let killed = guest.start_command(&shell("echo up; sleep 1000; echo on")).unwrap();
    killed.wait_for_line("up", SOON).unwrap();
    killed.send_signal("KILL").unwrap();
    assert_eq!(killed.wait_for_exit(SOON, |line| assert_ne!(line, "on")).unwrap(), 128 + 9);

    let directory = guest.daemon().directory_path().to_owned();
    drop(guest);
    assert_eq!(leftovers::find_processes(&directory).unwrap(), []);
    assert!(!directory.exists());
}

#[test]
#[ignore = "needs qemu-system-x86"]
fn a_panic_of_the_kernel_is_an_error_with_its_last_lines() {
    let guest = Guest::builder().with_cpus(1).with_memory(256 << 20).boot().unwrap();
    let waiting = guest.start_command(&shell("sleep 1000")).unwrap();
    let ended = guest.run_command(&shell("echo c >/proc/sysrq-trigger"), SOON, |_| ());
    let error = format!("{:#}", ended.unwrap_err());
    assert!(error.contains("sysrq triggered crash") && error.contains("ended before"), "{error}");
    assert!(waiting.wait_for_exit(SOON, |_| ()).unwrap_err().to_string().contains("ended before"));
    assert!(guest.run_command(&shell("true"), SOON, |_| ()).is_err());
}

#[test]
#[ignore = "needs qemu-system-x86"]
fn a_disk_can_be_mounted_and_the_network_leads_both_ways() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server =
        thread::spawn(move || listener.accept().unwrap().0.write_all(b"from the machine\n").unwrap());
    let forwarded = reserve_port().unwrap();
    let guest = Guest::builder()
        .with_disk(512 << 20)
        .forward_port(forwarded.socket_address().into(), 7000)
        .boot()
        .unwrap();
    let text = guest.command_output(&shell(&format!("nc host {port}")), SOON).unwrap();
    assert_eq!(text, "from the machine\n");
    server.join().unwrap();

    let _serving =
        guest.start_command(&shell("while true; do echo from the guest | nc -l -p 7000; done")).unwrap();
    let answer = wait_until(SOON, "the guest's server", || {
        let mut text = String::new();
        TcpStream::connect(forwarded.socket_address())?.read_to_string(&mut text)?;
        ensure!(!text.is_empty(), "no answer");
        Ok(text)
    });
    assert_eq!(answer.unwrap(), "from the guest\n");

    let mount = "mkfs.ext4 -q /dev/vdc && mount /dev/vdc /mnt && echo kept >/mnt/a && cat /mnt/a";
    assert_eq!(guest.command_output(&shell(mount), SOON).unwrap(), "kept\n");
}

#[test]
fn a_disk_without_a_size_is_rejected() {
    let scratch = ScratchDir::new().unwrap();
    assert!(create_disk(&scratch.path().join("disk"), 0).is_err());
}
