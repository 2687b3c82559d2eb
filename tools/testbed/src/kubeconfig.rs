//! Kubeconfigs without a control plane.

/// A kubeconfig of an API server that does not answer.
pub const UNREACHABLE_KUBECONFIG: &str = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
    contexts: [{name: c, context: {cluster: k, user: u}}]\n\
    clusters: [{name: k, cluster: {server: \"https://127.0.0.1:1\"}}]\nusers: [{name: u, user: {}}]\n";
