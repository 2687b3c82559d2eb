//! The least role of each call: the one table that the node enforces and docs/nodectl.md prints.

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

/// The path of a method of the control API before its name.
const CONTROL: &str = "/nodekeel.control.v1.Control/";

/// The least role that may call the method with this path of gRPC, `/PACKAGE.SERVICE/METHOD`. The services that a program adds
/// were made for root alone: their methods, like any that the table does not have, are for admins.
pub fn least_role(path: &str) -> Role {
    let method = path.strip_prefix(CONTROL);
    METHODS.iter().find(|(name, _)| Some(*name) == method).map_or(Admin, |(_, role)| *role)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_exactly_the_methods_of_the_definition_in_their_order() {
        let proto = concat!(env!("CARGO_MANIFEST_DIR"), "/proto");
        let files = protox::compile(["nodekeel/control/v1/control.proto"], [proto]).expect("it compiles");
        let file = files.file.iter().find(|file| file.package() == "nodekeel.control.v1").expect("there");
        let [service] = &file.service[..] else { panic!("one service") };
        assert_eq!(format!("/{}.{}/", file.package(), service.name()), CONTROL);
        let methods: Vec<_> = service.method.iter().map(|method| method.name()).collect();
        let listed: Vec<_> = METHODS.iter().map(|(name, _)| *name).collect();
        assert_eq!(listed, methods);
    }

    #[test]
    fn what_the_table_does_not_have_is_for_admins() {
        for (path, role) in [
            ("/nodekeel.control.v1.Control/Tree", Reader),
            ("/nodekeel.control.v1.Control/Restart", Operator),
            ("/nodekeel.control.v1.Control/Reset", Admin),
            ("/nodekeel.control.v1.Control/tree", Admin),
            ("/nodekeel.control.v1.Control/", Admin),
            ("/example.v1.Echo/Tree", Admin),
            ("Tree", Admin),
            ("", Admin),
        ] {
            assert_eq!(least_role(path), role, "{path}");
        }
    }
}
