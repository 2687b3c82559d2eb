//! Prints a plan for people.

use std::fmt;
use std::path::PathBuf;

use super::{NodePlan, ServicePlan};

impl fmt::Display for NodePlan {
    /// What `run` would start, for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "node {} with data in {}", self.config.node.name, self.config.node.data.display())?;
        writeln!(f, "{:<24} the control API on {}", "root.control", self.socket.display())?;
        for planned in &self.services {
            write!(f, "{:<24} ", planned.dn)?;
            match &planned.skip_reason {
                Some(reason) => writeln!(f, "skipped: {reason}")?,
                None => writeln!(f, "{}", planned.service)?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for ServicePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Etcd(etcd) => write!(
                f,
                "{}, clients on 127.0.0.1:{}, peers on 127.0.0.1:{}, data in {}",
                etcd.binary.display(),
                etcd.config.client_port,
                etcd.config.peer_port,
                etcd.data.display()
            ),
            Self::Cluster(cluster) => cluster.fmt(f),
            Self::Containerd(containerd) => {
                write!(
                    f,
                    "{}, API on {}, data in {}",
                    containerd.binary.display(),
                    containerd.directories.socket_path().display(),
                    containerd.directories.data_dir().display()
                )?;
                let config = &containerd.config;
                let mut write_path = |what, path: Option<&PathBuf>| {
                    path.map_or(Ok(()), |path| write!(f, ", {what} {}", path.display()))
                };
                write_path("configured by", config.config.as_ref())?;
                write_path("images from", config.preseed.as_ref())?;
                match &config.cri {
                    None => Ok(()),
                    Some(cri) if cri.runsc.is_some() => f.write_str(", for a kubelet, with runc and runsc"),
                    Some(_) => f.write_str(", for a kubelet, with runc"),
                }
            }
            Self::Provisioner(volumes) => volumes.fmt(f),
            Self::User(user) => {
                write!(f, "{}", user.binary.display())?;
                for argument in &user.config.command[1..] {
                    write!(f, " {argument:?}")?;
                }
                if !user.start_after.is_empty() {
                    write!(f, ", after {}", user.start_after.join(", "))?;
                }
                Ok(())
            }
        }
    }
}
