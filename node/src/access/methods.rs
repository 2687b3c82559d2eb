//! Who may call each method: the one table that the node enforces and docs/nodectl.md prints.

use super::Role;
use super::Role::{Admin, Operator, Reader};

/// The methods of the control API, in the order of its definition, and the least role that may call them.
pub const METHODS: &[(&str, Role)] = &[
    ("Version", Reader),
    ("Tree", Reader),
    ("WatchTree", Reader),
    ("ResolveDn", Reader),
    ("Health", Reader),
    ("WatchHealth", Reader),
    ("Status", Reader),
    ("Logs", Reader),
    ("LogLevels", Reader),
    ("SetLogLevel", Operator),
    ("Events", Reader),
    ("Start", Operator),
    ("Stop", Operator),
    ("Restart", Operator),
    ("Signal", Operator),
    ("Reload", Operator),
    // It reads files that the text names, and its errors may quote them.
    ("CheckConfig", Admin),
    ("ReloadConfig", Operator),
    ("Cluster", Reader),
    ("Bootstrap", Admin),
    ("Members", Reader),
    ("Defragment", Operator),
    ("Disarm", Operator),
    // All of the store, for a recipient that the caller chooses.
    ("SnapshotCluster", Admin),
    ("RestoreCluster", Admin),
    ("CreateGoldenTicket", Admin),
    ("WithdrawGoldenTicket", Admin),
    ("CreateJoinTicket", Admin),
    ("JoinTickets", Reader),
    ("RevokeJoinTicket", Admin),
    ("RemoveNode", Admin),
    ("Leave", Admin),
    ("ReplaceNode", Admin),
    ("RecoverCluster", Admin),
    ("Images", Reader),
    ("WatchImages", Reader),
    // It brings programs, from any file of the node.
    ("ImportImages", Admin),
    ("VerifyImages", Operator),
    ("Storage", Reader),
    // The passphrase is what permits it.
    ("UnlockStorage", Operator),
    ("RotateStorageKeys", Admin),
    ("AddRecoveryPassphrase", Admin),
    ("ConfirmRecoveryPassphrase", Admin),
    ("TrimStorage", Operator),
    ("AcknowledgeStorage", Operator),
    ("BackUpStorageHeader", Admin),
    ("RestoreStorageHeader", Admin),
    ("ScrubStorage", Operator),
    ("CancelStorageScrub", Operator),
    ("ReencryptStorage", Admin),
    ("EraseStorage", Admin),
    ("Reset", Admin),
    ("Operators", Reader),
    ("AddOperator", Admin),
    ("RemoveOperator", Admin),
];

/// The methods by which nodes of a cluster call each other, in the order of their definition, and who may call them.
pub const NODE_METHODS: &[(&str, Callers)] = &[
    ("UnlockKeys", Callers::Nodes),
    ("Enrol", Callers::Strangers),
    ("WatchRecords", Callers::Nodes),
    // Of its own key alone, also if the cluster has it no more.
    ("WhoAmI", Callers::Strangers),
    ("ReplaceUnlockKeys", Callers::Nodes),
];

/// The paths of the methods before their names.
const CONTROL: &str = "/nodekeel.control.v1.Control/";
const NODE: &str = "/nodekeel.node.v1.Node/";

/// What a key on another machine stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Principal {
    /// An operator, with this role.
    Operator(Role),
    /// Another node of the cluster.
    Node,
    /// Anyone, who came to enrol: also the key of an operator or a node does.
    Stranger,
}

/// Who may call a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Callers {
    /// Operators with this role, or with one that may do more.
    Operators(Role),
    /// The other nodes of the cluster.
    Nodes,
    /// Whoever comes to enrol.
    Strangers,
}

impl Callers {
    /// Returns whether this is one of them.
    pub(crate) fn contains(self, principal: Principal) -> bool {
        match (self, principal) {
            (Self::Operators(least), Principal::Operator(role)) => role >= least,
            (Self::Nodes, Principal::Node) | (Self::Strangers, Principal::Stranger) => true,
            _ => false,
        }
    }
}

/// Who may call the method with this path of gRPC, `/PACKAGE.SERVICE/METHOD`. The services that a program adds were made for root
/// alone: their methods, like any that the tables do not have, are for admins.
pub(crate) fn callers_of(path: &str) -> Callers {
    fn find<T: Copy>(methods: &[(&str, T)], method: &str) -> Option<T> {
        methods.iter().find(|(name, _)| *name == method).map(|(_, callers)| *callers)
    }
    let of_control = || find(METHODS, path.strip_prefix(CONTROL)?).map(Callers::Operators);
    let of_node = || find(NODE_METHODS, path.strip_prefix(NODE)?);
    of_control().or_else(of_node).unwrap_or(Callers::Operators(Admin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_have_exactly_the_methods_of_the_definitions_in_their_order() {
        let proto = concat!(env!("CARGO_MANIFEST_DIR"), "/proto");
        let of_control: Vec<_> = METHODS.iter().map(|(name, _)| *name).collect();
        let of_node: Vec<_> = NODE_METHODS.iter().map(|(name, _)| *name).collect();
        for (name, prefix, listed) in [("control", CONTROL, of_control), ("node", NODE, of_node)] {
            let files = protox::compile([format!("nodekeel/{name}/v1/{name}.proto")], [proto]);
            let files = files.expect("it compiles");
            let package = format!("nodekeel.{name}.v1");
            let file = files.file.iter().find(|file| file.package() == package).expect("there");
            let [service] = &file.service[..] else { panic!("one service") };
            assert_eq!(format!("/{package}.{}/", service.name()), prefix);
            let methods: Vec<_> = service.method.iter().map(|method| method.name()).collect();
            assert_eq!(listed, methods);
        }
    }

    #[test]
    fn what_the_tables_do_not_have_is_for_admins() {
        for (path, role) in [
            ("/nodekeel.control.v1.Control/Tree", Reader),
            ("/nodekeel.control.v1.Control/Restart", Operator),
            ("/nodekeel.control.v1.Control/Reset", Admin),
            ("/nodekeel.control.v1.Control/tree", Admin),
            ("/nodekeel.control.v1.Control/UnlockKeys", Admin),
            ("/nodekeel.control.v1.Control/", Admin),
            ("/nodekeel.node.v1.Node/Tree", Admin),
            ("/example.v1.Echo/Tree", Admin),
            ("Tree", Admin),
            ("", Admin),
        ] {
            assert_eq!(callers_of(path), Callers::Operators(role), "{path}");
        }
        assert_eq!(callers_of("/nodekeel.node.v1.Node/UnlockKeys"), Callers::Nodes);
        for method in ["Enrol", "WhoAmI"] {
            assert_eq!(callers_of(&format!("/nodekeel.node.v1.Node/{method}")), Callers::Strangers);
        }
    }

    #[test]
    fn a_node_may_call_no_method_of_operators_and_no_operator_one_of_nodes() {
        for role in Role::ALL {
            assert!(!Callers::Operators(role).contains(Principal::Node));
            assert!(!Callers::Nodes.contains(Principal::Operator(role)));
        }
        assert!(Callers::Nodes.contains(Principal::Node));
        for callers in [Callers::Operators(Reader), Callers::Nodes] {
            assert!(!callers.contains(Principal::Stranger));
        }
        for principal in [Principal::Operator(Admin), Principal::Node] {
            assert!(!Callers::Strangers.contains(principal));
        }
    }
}
