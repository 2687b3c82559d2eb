//! Compares the table of principals in `deploy/README.md` with the roles and the policies of `deploy/`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use k8s_openapi::api::admissionregistration::v1 as api;
use serde_json::Value;

use crate::config::DaemonConfig;

const README: &str = include_str!("../../../deploy/README.md");
const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy");

/// The tokens of the table: the account of each, and the manifests with its roles.
const TOKENS: [(&str, &str, &[&str]); 2] = [
    ("node", "provisionerd", &[include_str!("../../../deploy/rbac.yaml")]),
    (
        "agent",
        "provisionerd-agent",
        &[
            include_str!("../../../deploy/agent/rbac.yaml"),
            include_str!("../../../deploy/agent/remove-volumes.yaml"),
        ],
    ),
];

/// A token, a verb and an object: `NAMESPACE/RESOURCE.GROUP`, without what is empty.
type Permission = (String, String, String);

fn documents(yaml: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(yaml).expect("YAML")
}

fn texts(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().map(|text| text.as_str().expect("a text"))
}

/// The rows of the table: each permission with the policies that bound it.
fn table() -> BTreeMap<Permission, Vec<String>> {
    let mut table = BTreeMap::new();
    let rows = README.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    for row in rows.map(|row| row.split(" | ").collect::<Vec<_>>()) {
        let [token, verbs, objects, _, policies] = row[..] else { continue };
        let words = |cell: &str| -> Vec<String> {
            cell.split(", ").map(|word| word.trim_matches('`').to_owned()).collect()
        };
        if !TOKENS.iter().any(|(name, ..)| *name == token) {
            continue;
        }
        for verb in words(verbs) {
            for object in words(objects) {
                let policies = words(policies);
                let old = table.insert((token.to_owned(), verb.clone(), object.clone()), policies);
                assert!(old.is_none(), "two rows for {token} {verb} {object}");
            }
        }
    }
    table
}

/// What the roles grant.
fn granted() -> BTreeSet<Permission> {
    let mut granted = BTreeSet::new();
    for (token, _, manifests) in TOKENS {
        let roles = manifests.iter().flat_map(|yaml| documents(yaml));
        for role in roles.filter(|it| matches!(it["kind"].as_str(), Some("Role" | "ClusterRole"))) {
            let namespace = role["metadata"]["namespace"].as_str();
            for rule in role["rules"].as_array().expect("rules") {
                for (group, resource, verb) in texts(&rule["apiGroups"]).flat_map(|group| {
                    texts(&rule["resources"]).flat_map(move |resource| {
                        texts(&rule["verbs"]).map(move |verb| (group, resource, verb))
                    })
                }) {
                    let group = if group.is_empty() { String::new() } else { format!(".{group}") };
                    let namespace = namespace.map(|name| format!("{name}/")).unwrap_or_default();
                    granted.insert((
                        token.to_owned(),
                        verb.to_owned(),
                        format!("{namespace}{resource}{group}"),
                    ));
                }
            }
        }
    }
    granted
}

/// The policies of `deploy/policy` by the name of their file.
fn policies() -> BTreeMap<String, Vec<api::ValidatingAdmissionPolicy>> {
    let mut policies = BTreeMap::new();
    for file in fs::read_dir(Path::new(DEPLOY).join("policy")).expect("list") {
        let path = file.expect("a file").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned();
        if name == "kustomization" {
            continue;
        }
        let objects = documents(&fs::read_to_string(&path).expect("a manifest"));
        let mut found = Vec::new();
        for pair in objects.chunks(2) {
            let [policy, binding] = pair else { panic!("{name}: a policy and its binding") };
            let policy: api::ValidatingAdmissionPolicy =
                serde_json::from_value(policy.clone()).expect("a policy");
            let binding: api::ValidatingAdmissionPolicyBinding =
                serde_json::from_value(binding.clone()).expect("a binding");
            let binding = binding.spec.expect("a spec");
            assert_eq!(binding.policy_name, policy.metadata.name);
            assert_eq!(binding.validation_actions, Some(vec!["Deny".to_owned()]), "{name}");
            let spec = policy.spec.as_ref().expect("a spec");
            assert_eq!(spec.failure_policy.as_deref(), Some("Fail"), "{name}");
            assert_eq!(binding.param_ref.is_some(), spec.param_kind.is_some(), "{name}");
            // The account alone: another condition would let requests pass.
            assert_eq!(spec.match_conditions.as_ref().map(Vec::len), Some(1), "{name}");
            // It is evaluated once for each parameter, for the requests of every client: classes are few.
            let parameter = spec.param_kind.as_ref().and_then(|param| param.kind.as_deref());
            assert!(matches!(parameter, None | Some("StorageClass")), "{name}: {parameter:?}");
            found.push(policy);
        }
        policies.insert(name, found);
    }
    policies
}

/// Returns whether a policy applies to a verb of an account.
fn applies(policy: &api::ValidatingAdmissionPolicy, account: &str, verb: &str, object: &str) -> bool {
    let operation = match verb {
        "create" => "CREATE",
        "patch" => "UPDATE",
        "delete" => "DELETE",
        _ => return false,
    };
    let spec = policy.spec.as_ref().expect("a spec");
    let conditions = spec.match_conditions.as_deref().unwrap_or_default();
    let user = format!("'system:serviceaccount:nodekeel:{account}'");
    let object = object.strip_prefix("nodekeel/").unwrap_or(object);
    let (resource, group) = object.split_once('.').unwrap_or((object, ""));
    let rules = spec.match_constraints.as_ref().and_then(|all| all.resource_rules.as_deref());
    let has = |all: &Option<Vec<String>>, wanted: &str| all.iter().flatten().any(|it| it == wanted);
    conditions.first().is_some_and(|condition| condition.expression.contains(&user))
        && rules.into_iter().flatten().any(|rule| {
            has(&rule.api_groups, group) && has(&rule.resources, resource) && has(&rule.operations, operation)
        })
}

#[test]
fn the_table_of_principals_has_every_verb_that_the_roles_grant_and_no_other() {
    let listed: BTreeSet<_> = table().into_keys().collect();
    let granted = granted();
    let missing: Vec<_> = granted.difference(&listed).collect();
    let surplus: Vec<_> = listed.difference(&granted).collect();
    assert!(
        missing.is_empty() && surplus.is_empty(),
        "not in the table: {missing:?}; not granted: {surplus:?}"
    );
}

#[test]
fn each_policy_that_the_table_names_applies_and_each_write_has_one() {
    let policies = policies();
    let mut used = BTreeSet::new();
    for ((token, verb, object), names) in table() {
        let (_, account, _) = TOKENS.iter().find(|(name, ..)| **name == token).expect("a token");
        let is_read = ["get", "list", "watch"].contains(&verb.as_str());
        if is_read {
            assert_eq!(names, ["–"], "admission does not see reads: {token} {verb} {object}");
            continue;
        }
        for name in names {
            let files = policies.get(&name).unwrap_or_else(|| panic!("no policy {name}"));
            let is_applied = files.iter().any(|policy| applies(policy, account, &verb, &object));
            assert!(is_applied, "{name} does not apply to {token} {verb} {object}");
            used.insert(name);
        }
    }
    assert_eq!(used, policies.into_keys().collect(), "each policy bounds a verb");
}

#[test]
fn a_policy_names_this_driver_and_its_accounts_alone() {
    let driver = DaemonConfig::default().driver;
    let accounts = TOKENS.map(|(_, account, _)| format!("system:serviceaccount:nodekeel:{account}"));
    for file in fs::read_dir(Path::new(DEPLOY).join("policy")).expect("list") {
        let path = file.expect("a file").path();
        let text = fs::read_to_string(&path).expect("a manifest");
        let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
        for quoted in lines.flat_map(|line| line.split('\'')).filter(|text| text.contains("nodekeel")) {
            // The first two, and the prefix of its annotations.
            let is_known = [driver.to_string(), driver.topology_key(), format!("{driver}/")]
                .iter()
                .chain(&accounts)
                .any(|known| known == quoted);
            assert!(is_known, "{}: {quoted}", path.display());
        }
    }
}
