//! A plan for people.

use std::fmt;

use super::{Plan, Service};

impl fmt::Display for Plan {
    /// What would happen, for people.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "node {} with data in {}", self.config.node.name, self.config.node.data.display())?;
        writeln!(f, "{:<24} the control API on {}", "root.control", self.socket.display())?;
        for planned in &self.services {
            write!(f, "{:<24} ", planned.dn)?;
            match &planned.skipped {
                Some(reason) => writeln!(f, "skipped: {reason}")?,
                None => writeln!(f, "{}", planned.service)?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Service {
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
                    containerd.place.socket().display(),
                    containerd.place.data().display()
                )?;
                let preseed = containerd.config.preseed.iter();
                preseed.into_iter().try_for_each(|preseed| write!(f, ", images from {}", preseed.display()))
            }
            Self::Provisioner(volumes) => volumes.fmt(f),
            Self::User(user) => {
                write!(f, "{}", user.binary.display())?;
                for argument in &user.config.command[1..] {
                    write!(f, " {argument:?}")?;
                }
                if !user.after.is_empty() {
                    write!(f, ", after {}", user.after.join(", "))?;
                }
                Ok(())
            }
        }
    }
}
