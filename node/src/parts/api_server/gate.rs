//! The gate before each call from another machine: who calls, and whether the role permits it.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use tonic::Status;

use super::audit::{Audit, method_name};
use crate::access::{Callers, Principal, PublicKey, callers_of};
use crate::caller::RemoteCaller;
use crate::parts::api::identities::{Identities, Identity};

/// The client of a call, as its connection knows it: the key that it has proved.
#[derive(Debug, Clone, Copy)]
pub(super) struct RemotePeer {
    /// True if it came to enrol: the key may be that of anyone.
    pub(super) is_stranger: bool,
    pub(super) key: PublicKey,
    pub(super) address: SocketAddr,
}

/// Admits a call, or answers it with the reason, and records both.
pub(super) async fn admit(
    identities: Arc<Identities>,
    audit: Arc<Audit>,
    mut request: Request,
    next: Next,
) -> Response {
    let peer = request.extensions().get::<RemotePeer>().copied();
    // The record of this moment counts: the connection is closed when it changes, but that takes a moment.
    let caller = peer.and_then(|peer| {
        let identity =
            if peer.is_stranger { Some(Identity::stranger(peer.key)) } else { identities.find(&peer.key) };
        Some((identity?, peer.address))
    });
    let Some((identity, address)) = caller else {
        return Status::permission_denied("permission denied: this key is not admitted any more").into_http();
    };
    let path = request.uri().path().to_owned();
    let call = audit.begin(&identity, address, &path);
    let response = match check_caller(&identity, &path) {
        Ok(()) => {
            let Identity { name, key, principal, .. } = identity;
            match principal {
                Principal::Operator(_) => _ = request.extensions_mut().insert(RemoteCaller { name, address }),
                Principal::Node => _ = request.extensions_mut().insert(CallingNode { key }),
                Principal::Stranger => _ = request.extensions_mut().insert(CallingStranger { key, address }),
            }
            next.run(request).await
        }
        Err(status) => status.into_http(),
    };
    call.end(&response);
    response
}

/// The node behind a call: the service for nodes finds it in an admitted request.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallingNode {
    pub(super) key: PublicKey,
}

/// The machine behind a call to enrol.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallingStranger {
    pub(super) key: PublicKey,
    pub(super) address: SocketAddr,
}

#[allow(clippy::result_large_err, reason = "it is the answer of a call")]
fn check_caller(caller: &Identity, path: &str) -> Result<(), Status> {
    let callers = callers_of(path);
    if callers.contains(caller.principal) {
        return Ok(());
    }
    let (method, name) = (method_name(path), &caller.name);
    Err(Status::permission_denied(match (callers, caller.principal) {
        (Callers::Operators(least), Principal::Operator(role)) => format!(
            "permission denied: {method} needs the role {least}, and {name} has the role {role}; an admin of the node can change it"
        ),
        (Callers::Operators(_), _) => {
            format!("permission denied: {method} is for operators, and {name} is none")
        }
        (Callers::Nodes, _) => format!("permission denied: {method} is for other nodes of the cluster"),
        (Callers::Strangers, _) => format!("permission denied: {method} is for machines that come to enrol"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{METHODS, NODE_METHODS, PrivateKey, Role};

    fn caller(name: &str, principal: Principal) -> Identity {
        let key = PrivateKey::generate().expect("random numbers").public_key();
        Identity { name: name.into(), key, principal }
    }

    #[test]
    fn a_node_may_exactly_what_the_table_says() {
        let node = caller("nodekeel-1", Principal::Node);
        for (method, _) in METHODS {
            let refused = check_caller(&node, &format!("/nodekeel.control.v1.Control/{method}"));
            let refused = refused.expect_err("of operators");
            assert!(refused.message().contains(&format!("{method} is for operators")), "{refused}");
        }
        check_caller(&node, "/example.v1.Echo/Say").expect_err("of the program");
        for (method, callers) in NODE_METHODS {
            let path = format!("/nodekeel.node.v1.Node/{method}");
            assert_eq!(check_caller(&node, &path).is_ok(), *callers == Callers::Nodes, "{method}");
            let refused = check_caller(&caller("alice", Principal::Operator(Role::Admin)), &path);
            assert!(refused.expect_err("of nodes").message().contains("is for"));
        }
    }

    #[test]
    fn a_stranger_may_enrol_and_ask_who_it_is_and_nothing_else() {
        let stranger = caller("ed25519:A", Principal::Stranger);
        for (method, _) in METHODS {
            check_caller(&stranger, &format!("/nodekeel.control.v1.Control/{method}")).expect_err(method);
        }
        check_caller(&stranger, "/example.v1.Echo/Say").expect_err("of the program");
        for (method, _) in NODE_METHODS {
            let checked = check_caller(&stranger, &format!("/nodekeel.node.v1.Node/{method}"));
            assert_eq!(checked.is_ok(), ["Enrol", "WhoAmI"].contains(method), "{method}");
        }
    }

    #[test]
    fn each_role_may_exactly_what_the_table_says() {
        for role in Role::ALL {
            let caller = caller("alice", Principal::Operator(role));
            for (method, least) in METHODS {
                let checked = check_caller(&caller, &format!("/nodekeel.control.v1.Control/{method}"));
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
            assert_eq!(check_caller(&caller, "/example.v1.Echo/Say").is_ok(), role == Role::Admin);
        }
    }
}
