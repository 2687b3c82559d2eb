//! Debian's Tang server.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result};

use crate::{ReservedPort, ScratchDir, reserve_port, tools};

/// A Tang server on a port of this machine: one tangd for each connection, as systemd's socket starts it. Dropping it ends
/// it and removes its keys.
#[derive(Debug)]
pub struct TangServer {
    keys: ScratchDir,
    port: ReservedPort,
    program: PathBuf,
    listener: Option<Listener>,
}

#[derive(Debug)]
struct Listener {
    is_stopped: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl TangServer {
    /// Starts one with new keys.
    ///
    /// # Errors
    /// [`tools::MissingTool`] where it isn't installed; no port is free.
    pub fn start() -> Result<Self> {
        let (keys, port) = (ScratchDir::new()?, reserve_port()?);
        let program = tools::find_tool(tools::TANGD)?;
        let mut server = Self { keys, port, program, listener: None };
        server.listen()?;
        server.create_keys()?;
        Ok(server)
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.port.socket_address())
    }

    /// The thumbprint of the key that signs its advertisements: the name of the key's file.
    ///
    /// # Errors
    /// There is none.
    pub fn thumbprint(&self) -> Result<String> {
        for (name, text) in self.advertised_keys()? {
            if text.contains("ES512") {
                return Ok(name.trim_end_matches(".jwk").to_owned());
            }
        }
        anyhow::bail!("tangd has no signing key in {}", self.keys.path().display())
    }

    /// Listens no more. The port stays reserved.
    pub fn stop(&mut self) {
        if let Some(Listener { is_stopped, thread }) = self.listener.take() {
            is_stopped.store(true, Ordering::Release);
            // The connection wakes the thread.
            let _ = TcpStream::connect(self.port.socket_address());
            let _ = thread.join();
        }
    }

    /// Listens again.
    ///
    /// # Errors
    /// Another program has its port.
    pub fn listen(&mut self) -> Result<()> {
        self.stop();
        let address = self.port.socket_address();
        let listener = TcpListener::bind(address).with_context(|| format!("listen on {address}"))?;
        let is_stopped = Arc::<AtomicBool>::default();
        let (stopped, program, keys) =
            (Arc::clone(&is_stopped), self.program.clone(), self.keys.path().to_owned());
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if stopped.load(Ordering::Acquire) {
                    break;
                }
                let mut command = Command::new(&program);
                command.arg(&keys).stderr(Stdio::null());
                if let Ok(output) = stream.try_clone() {
                    command.stdin(OwnedFd::from(stream)).stdout(OwnedFd::from(output));
                    // It ends with its connection.
                    let child = command.spawn();
                    drop(command);
                    if let Ok(mut child) = child {
                        std::thread::spawn(move || child.wait());
                    }
                }
            }
        });
        self.listener = Some(Listener { is_stopped, thread });
        Ok(())
    }

    /// Replaces its keys, as `tangd-rotate-keys` does: the ones before are no longer advertised, and still recover.
    ///
    /// # Errors
    /// The keys can't be renamed.
    pub fn rotate_keys(&self) -> Result<()> {
        for (name, _) in self.advertised_keys()? {
            let directory = self.keys.path();
            fs::rename(directory.join(&name), directory.join(format!(".{name}"))).context("hide a key")?;
        }
        self.create_keys()
    }

    /// Removes the keys that it doesn't advertise: what was bound to them is lost.
    ///
    /// # Errors
    /// A key can't be removed.
    pub fn remove_old_keys(&self) -> Result<()> {
        for entry in fs::read_dir(self.keys.path()).context("list the keys")? {
            let path = entry.context("list the keys")?.path();
            if path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")) {
                fs::remove_file(&path).context("remove a key")?;
            }
        }
        Ok(())
    }

    /// tangd makes keys when it is asked and has none.
    fn create_keys(&self) -> Result<()> {
        let mut command = Command::new(&self.program);
        command.arg(self.keys.path()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("execute tangd")?;
        let mut request = child.stdin.take().context("the input is piped")?;
        std::io::Write::write_all(&mut request, b"GET /adv HTTP/1.1\r\n\r\n").context("ask tangd")?;
        drop(request);
        child.wait_with_output().context("wait for tangd").map(drop)
    }

    fn advertised_keys(&self) -> Result<Vec<(String, String)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.keys.path()).context("list the keys")? {
            let path = entry.context("list the keys")?.path();
            let name = path.file_name().unwrap_or_default().display().to_string();
            if !name.starts_with('.') && name.ends_with(".jwk") {
                found.push((name, fs::read_to_string(&path).context("read a key")?));
            }
        }
        Ok(found)
    }
}

impl Drop for TangServer {
    fn drop(&mut self) {
        self.stop();
    }
}
