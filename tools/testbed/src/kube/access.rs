//! Access to the API: tokens and kubeconfigs.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::{Kube, KubeUser};
use crate::command_output;

/// The address at which a guest with user networking finds this machine's loopback interface. The API
/// server's certificate names it.
///
/// *Source:* QEMU's manual, network options: the host of `-netdev user` is x.x.x.2.
pub(super) const SEEN_FROM_GUEST: &str = "10.0.2.2";

impl Kube {
    /// The kubeconfig of a user: `admin`, or one of the builder's.
    ///
    /// # Errors
    /// The user is unknown.
    pub fn kubeconfig_file(&self, user: &str) -> Result<PathBuf> {
        let path = kubeconfig_path(self.home.path(), user);
        if !path.exists() {
            let names: Vec<_> = self.options.users.iter().map(|user| user.name.as_str()).collect();
            bail!("unknown user {user:?}; known: {}", names.join(", "));
        }
        Ok(path)
    }

    /// The same for a guest with user networking, as text that includes the certificate.
    ///
    /// # Errors
    /// As [`kubeconfig_file`](Self::kubeconfig_file).
    pub fn kubeconfig_for_guest(&self, user: &str) -> Result<String> {
        let mut kubectl = self.kubectl_as(user)?;
        let text = command_output(kubectl.args(["config", "view", "--raw", "--flatten", "--output=json"]))?;
        let mut config: Value = serde_json::from_str(&text).context("parse the kubeconfig")?;
        config["clusters"][0]["cluster"]["server"] =
            format!("https://{SEEN_FROM_GUEST}:{}", self.api_port()).into();
        Ok(config.to_string())
    }

    /// Writes the token file and the kubeconfigs; before any daemon runs.
    pub(super) fn write_access(&self) -> Result<()> {
        let mut tokens = String::new();
        for user in &self.options.users {
            let token = random_token()?;
            tokens += &token_line(&token, user);
            self.write_kubeconfig(&user.name, &token)?;
        }
        let path = self.tokens();
        fs::write(&path, tokens).with_context(|| format!("write {}", path.display()))
    }

    pub(super) fn tokens(&self) -> PathBuf {
        self.home.path().join("tokens.csv")
    }

    /// The directory of the key and the certificate that the API server creates for itself.
    pub(super) fn pki(&self) -> PathBuf {
        self.home.path().join("pki")
    }

    fn write_kubeconfig(&self, user: &str, token: &str) -> Result<()> {
        let path = kubeconfig_path(self.home.path(), user);
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "testbed",
            "clusters": [{"name": "testbed", "cluster": {
                "server": self.api_url(), "certificate-authority": self.pki().join("apiserver.crt"),
            }}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "testbed", "context": {
                "cluster": "testbed", "user": user, "namespace": default_namespace(user),
            }}],
        });
        fs::write(&path, config.to_string()).with_context(|| format!("write {}", path.display()))
    }
}

/// The namespace of a service account, as in its pod.
fn default_namespace(user: &str) -> &str {
    let account = user.strip_prefix("system:serviceaccount:").and_then(|account| account.split_once(':'));
    account.map_or("default", |(namespace, _)| namespace)
}

fn kubeconfig_path(home: &Path, user: &str) -> PathBuf {
    home.join(format!("{}.kubeconfig", user.replace(['/', ':'], "-")))
}

/// *Source:* kubernetes.io, authentication, static token file: `token,user,uid,"group1,group2"`.
fn token_line(token: &str, user: &KubeUser) -> String {
    let name = &user.name;
    match user.groups.as_slice() {
        [] => format!("{token},{name},{name}\n"),
        groups => format!("{token},{name},{name},\"{}\"\n", groups.join(",")),
    }
}

/// Another user of this machine can reach the port, and must not guess the token.
fn random_token() -> Result<String> {
    let mut bytes = [0; 16];
    let random = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    random.context("read /dev/urandom")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
