//! Formats an error and its causes on one line.

use std::error::Error;

use kube::runtime::watcher;

/// Joins an error and its causes by colons; omits a cause that the text before it contains, as the messages of kube do.
/// Of an answer of the API server it takes the message.
pub fn format_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let (cause, rest) = describe_error(error);
        next = rest;
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// The message of an error without its causes, and the first of these.
///
/// The messages of kube contain their causes, and that of an answer the whole answer, twice: events and log
/// lines get the sentence of the API server instead.
fn describe_error<'a>(error: &'a (dyn Error + 'static)) -> (String, Option<&'a (dyn Error + 'static)>) {
    if let Some(kube::Error::Api(status)) = error.downcast_ref() {
        return (describe_status(status), None);
    }
    match error.downcast_ref() {
        Some(watcher::Error::InitialListFailed(source)) => ("list".to_owned(), Some(source)),
        Some(watcher::Error::WatchStartFailed(source) | watcher::Error::WatchFailed(source)) => {
            ("watch".to_owned(), Some(source))
        }
        Some(watcher::Error::WatchError(status)) => (describe_status(status), None),
        _ => (error.to_string(), error.source()),
    }
}

fn describe_status(status: &kube::core::Status) -> String {
    if status.message.is_empty() { format!("HTTP status {}", status.code) } else { status.message.clone() }
}

#[cfg(test)]
mod tests {
    use kube::config::{Kubeconfig, KubeconfigError};

    use super::*;

    /// As kube's `InferConfigError` is.
    #[derive(Debug, thiserror::Error)]
    #[error("failed to infer config (kubeconfig: {0})")]
    struct InferError(#[source] KubeconfigError);

    #[test]
    fn a_cause_that_the_message_contains_is_not_repeated() {
        let missing = || Kubeconfig::read_from("/nowhere/config").expect_err("no such file");
        let message = missing().to_string();
        assert_eq!(format_chain(&missing()), message);
        let error = InferError(missing());
        assert_eq!(format_chain(&error), format!("failed to infer config (kubeconfig: {message})"));
    }

    #[test]
    fn an_answer_of_the_api_server_is_one_sentence() {
        let status = serde_json::json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403,
            "message": "persistentvolumes is forbidden: User \"x\" cannot create resource \"persistentvolumes\"",
        });
        let status: kube::core::Status = serde_json::from_value(status).expect("a status");
        let error = kube::Error::Api(status.clone().boxed());
        assert_eq!(format_chain(&error), status.message);
        let error = watcher::Error::InitialListFailed(error);
        assert_eq!(format_chain(&error), format!("list: {}", status.message));
        let gone = kube::core::Status { message: String::new(), code: 410, ..status };
        assert_eq!(format_chain(&watcher::Error::WatchError(gone.boxed())), "HTTP status 410");
    }
}
