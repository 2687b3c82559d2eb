//! The gate before each call from another machine: who calls, and whether the role permits it.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use tonic::Status;

use super::audit::{Audit, method_name};
use super::operators::{Operator, Operators};
use crate::access::{PublicKey, least_role};
use crate::caller::RemoteCaller;

/// The operator behind a call, as its connection knows it: the key that it has proved.
#[derive(Debug, Clone, Copy)]
pub(super) struct RemotePeer {
    pub(super) key: PublicKey,
    pub(super) address: SocketAddr,
}

/// Admits a call, or answers it with the reason, and records both.
pub(super) async fn admit(
    operators: Arc<Operators>,
    audit: Arc<Audit>,
    mut request: Request,
    next: Next,
) -> Response {
    let peer = request.extensions().get::<RemotePeer>().copied();
    // The role of this moment counts: the connection is closed when it changes, but that takes a moment.
    let caller = peer.and_then(|peer| {
        let Operator { name, role, .. } = operators.find(&peer.key)?;
        Some(RemoteCaller { name, role, address: peer.address })
    });
    let Some(caller) = caller else {
        return Status::permission_denied("permission denied: this key is not one of an operator")
            .into_http();
    };
    let path = request.uri().path().to_owned();
    let call = audit.begin(&caller, &path);
    let response = match check_role(&caller, &path) {
        Ok(()) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(status) => status.into_http(),
    };
    call.end(&response);
    response
}

#[allow(clippy::result_large_err, reason = "it is the answer of a call")]
fn check_role(caller: &RemoteCaller, path: &str) -> Result<(), Status> {
    let least = least_role(path);
    if caller.role >= least {
        return Ok(());
    }
    Err(Status::permission_denied(format!(
        "permission denied: {} needs the role {least}, and {} has the role {}; an admin of the node can change it",
        method_name(path),
        caller.name,
        caller.role
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{METHODS, Role};

    #[test]
    fn each_role_may_exactly_what_the_table_says() {
        for role in Role::ALL {
            let caller =
                RemoteCaller { name: "alice".into(), role, address: ([192, 0, 2, 9], 50_412).into() };
            for (method, least) in METHODS {
                let checked = check_role(&caller, &format!("/nodekeel.control.v1.Control/{method}"));
                assert_eq!(checked.is_ok(), role >= *least, "{role} {method}");
                if let Err(status) = checked {
                    assert_eq!(status.code(), tonic::Code::PermissionDenied);
                    let text = status.message();
                    assert!(
                        text.contains(&format!(
                            "{method} needs the role {least}, and alice has the role {role}"
                        )),
                        "{text}"
                    );
                }
            }
            assert_eq!(check_role(&caller, "/example.v1.Echo/Say").is_ok(), role == Role::Admin);
        }
    }
}
