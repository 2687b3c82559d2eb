//! The messages and services of the CSI and of the kubelet's plugin registration, generated from `proto/`.
//!
//! A message with a secret field prints without it.

/// The Container Storage Interface, version 1.
#[allow(
    missing_docs,
    clippy::all,
    clippy::exhaustive_enums,
    clippy::missing_errors_doc,
    rustdoc::all,
    unnameable_types,
    unreachable_pub,
    dead_code,
    reason = "generated from the specification"
)]
pub mod csi {
    tonic::include_proto!("csi.v1");
    include!(concat!(env!("OUT_DIR"), "/debug.rs"));
}

/// The kubelet's plugin registration.
#[allow(
    missing_docs,
    clippy::all,
    clippy::exhaustive_enums,
    clippy::missing_errors_doc,
    rustdoc::all,
    unnameable_types,
    unreachable_pub,
    dead_code,
    reason = "generated from the Kubernetes API"
)]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}

#[cfg(test)]
mod tests {
    use super::csi;

    /// The messages of csi.proto with a field marked as secret, by searching its text.
    fn messages_with_secrets() -> Vec<&'static str> {
        let (mut found, mut message) = (Vec::new(), "");
        // An option may stand on the line below its field.
        for line in include_str!("../../proto/csi/v1/csi.proto").lines() {
            if let Some(name) = line.strip_prefix("message ") {
                message = name.trim_end_matches(" {");
            }
            if line.contains("(csi_secret) = true") {
                found.push(message);
            }
        }
        found
    }

    #[test]
    fn no_message_prints_a_secret() {
        let generated = include_str!(concat!(env!("OUT_DIR"), "/debug.rs"));
        let messages = messages_with_secrets();
        assert!(messages.len() > 10, "csi.proto marks its secrets");
        for message in messages {
            assert!(generated.contains(&format!("Debug for {message} {{")), "{message} prints its secrets");
        }
        assert!(!generated.contains("secrets"));
    }

    #[test]
    fn fields_that_are_not_secret_are_printed() {
        let request = csi::NodePublishVolumeRequest {
            volume_id: "a-volume".into(),
            secrets: [("password".into(), "hunter2".into())].into(),
            ..Default::default()
        };
        let printed = format!("{request:?}");
        assert!(printed.contains("a-volume") && printed.contains(".."), "{printed}");
        assert!(!printed.contains("hunter2") && !printed.contains("password"), "{printed}");
    }
}
