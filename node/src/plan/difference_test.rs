//! Tests of the difference between two plans.

use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::parts::{PartDeps, shipped_parts};
use crate::plan::PlanSource;
use crate::search_path::SearchPath;

fn source() -> PlanSource {
    let search = SearchPath::with_default_directories(None, None);
    let data = Some(std::env::temp_dir().join("nodekeel-difference-test"));
    PlanSource {
        parts: shipped_parts(PartDeps::default()),
        search,
        dev: false,
        file: None,
        data,
        beside_node: false,
        default_data: None,
    }
}

fn plan(text: &str) -> NodePlan {
    let text = format!("services.etcd.enable = false\nservices.containerd.enable = false\n{text}");
    source().plan_text(Path::new("a.toml"), &text, None).expect(&text)
}

fn service(name: &str, keys: &str) -> String {
    format!("[[service]]\nname = \"{name}\"\ncommand = [\"/bin/true\"]\n{keys}\n")
}

/// The changes, as text.
fn difference(running: &str, new: &str) -> Vec<String> {
    let running = plan(running);
    let text = format!("services.etcd.enable = false\nservices.containerd.enable = false\n{new}");
    let new = running.source.clone().plan_text(Path::new("a.toml"), &text, Some(&running)).expect(&text);
    compare_plans(&running, &new).changes.iter().map(ToString::to_string).collect()
}

#[test]
fn services_are_added_removed_and_restarted_with_the_keys_that_changed() {
    let (a, b) = (service("a", ""), service("b", "depends_on = [\"a\"]"));
    assert!(difference(&[&*a, &b].concat(), &[&*b, &a].concat()).is_empty(), "the order means nothing");
    assert_eq!(difference("", &a), ["add root.service.a"]);
    assert_eq!(difference(&a, ""), ["remove root.service.a"]);
    let changed = service("a", "grace = \"3s\"\nbackoff = { jitter = 0.1 }");
    assert_eq!(
        difference(&[&*a, &b].concat(), &[&*changed, &b].concat()),
        ["restart root.service.a: backoff, grace"],
        "a dependent runs on"
    );
    assert_eq!(
        difference(&[&*a, &b].concat(), &service("b", "")),
        ["reorder root.service.b: depends_on; it runs on", "remove root.service.a"]
    );
    let both = service("b", "depends_on = [\"a\"]\ngrace = \"3s\"");
    assert_eq!(
        difference(&[&*a, &service("b", "")].concat(), &[&*a, &both].concat()),
        ["restart root.service.b: depends_on, grace"]
    );
    // Its run watches what it was started with.
    let bound =
        |name: &str| service("b", &format!("depends_on = [{name:?}]\nrestart_with_dependencies = true"));
    let others = [service("a", ""), service("c", "")].concat();
    assert_eq!(
        difference(&[&*others, &bound("a")].concat(), &[&*others, &bound("c")].concat()),
        ["restart root.service.b: depends_on"]
    );
}

#[test]
fn a_part_whose_dependencies_alone_change_runs_on() {
    let port = |key: &str| {
        let port = testbed::reserve_port().expect("a free port").number();
        format!("{key} = {port}\n")
    };
    let etcd =
        format!("[services.etcd]\nbinary = \"/bin/true\"\n{}{}", port("client_port"), port("peer_port"));
    let plan = |text: &str, running: Option<&NodePlan>| {
        let text = format!("services.containerd.enable = false\n{text}");
        source().plan_text(Path::new("a.toml"), &text, running).expect(&text)
    };
    let running = plan(&format!("{etcd}{}", service("a", "")), None);
    let new = plan(&format!("{etcd}depends_on = [\"a\"]\n{}", service("a", "")), Some(&running));
    let changes: Vec<_> = compare_plans(&running, &new).changes.iter().map(ToString::to_string).collect();
    assert_eq!(changes, ["reorder root.etcd: services.etcd.depends_on; it runs on"]);
    assert_eq!(compare_plans(&merge_plans(&running, new.clone()), &new), PlanDifference::default());
}

#[test]
fn what_the_node_has_from_its_start_needs_a_restart_of_noded() {
    for (new, says) in [
        ("node.name = \"b\"", "restart noded: node.name"),
        ("log.bytes = 1048576", "restart noded: log.bytes"),
        ("control.socket = \"/tmp/a.sock\"", "restart noded: control.socket"),
        ("node.grace = \"3s\"", "restart noded: node.grace"),
    ] {
        assert_eq!(difference("", new), [says]);
    }
    for (new, says) in [
        ("health.min_free_percent = 7", "apply health.min_free_percent"),
        ("log.levels = { \"root.etcd\" = \"warn\" }", "apply log.levels.root.etcd"),
    ] {
        assert_eq!(difference("", new), [says]);
    }
    let both = "log.bytes = 1048576\nlog.levels = { \"root.etcd\" = \"warn\" }";
    assert_eq!(difference("", both), ["restart noded: log.bytes", "apply log.levels.root.etcd"]);
    // A default, written out, and a table of a part that runs nothing.
    for new in ["node.name = \"node\"", "services.etcd.client_port = 7"] {
        assert!(difference("", new).is_empty(), "{new}");
    }
}

#[test]
fn services_are_planned_by_their_dependencies_and_then_as_in_the_file() {
    let services = [("c", "\"b\""), ("a", ""), ("b", "\"d\""), ("d", "")];
    let text = services.map(|(name, dependency)| service(name, &format!("depends_on = [{dependency}]")));
    let plan = plan(&text.concat());
    let names: Vec<_> =
        plan.active_services().filter_map(|planned| planned.dn.strip_prefix("root.service.")).collect();
    assert_eq!(names, ["d", "b", "c", "a"]);
}

#[test]
fn dependents_stop_before_what_they_depend_on() {
    let running = plan(
        &[
            service("a", ""),
            service("b", "depends_on = [\"a\"]"),
            service("c", "depends_on = [\"b\"]"),
            service("d", ""),
        ]
        .concat(),
    );
    let waves = |dns: &[&str]| stop_waves(&running, dns.iter().copied().collect());
    let [a, b, c, d] = ["root.service.a", "root.service.b", "root.service.c", "root.service.d"];
    assert_eq!(waves(&[a, b, c, d]), [vec![c, d], vec![b], vec![a]]);
    // One that runs on does not order those that stop.
    assert_eq!(waves(&[a, c]), [vec![a, c]]);
    assert!(waves(&[]).is_empty());
}

proptest! {
    /// Any two configurations: their difference leads from the one to the other, and back.
    #[test]
    fn a_difference_leads_to_the_new_plan_and_back(old in configuration(), new in configuration()) {
        let (old, new) = (plan(&old), plan(&new));
        let there = compare_plans(&old, &new);
        prop_assert_eq!(compare_plans(&old, &old), PlanDifference::default());
        prop_assert_eq!(compare_plans(&merge_plans(&old, new.clone()), &new), PlanDifference::default());
        let mut dns: BTreeSet<&str> = old.active_services().map(|planned| planned.dn.as_str()).collect();
        for dn in there.dns_to(ChangeEffect::Remove) {
            prop_assert!(dns.remove(dn));
        }
        for dn in there.dns_to(ChangeEffect::Add) {
            prop_assert!(dns.insert(dn));
        }
        prop_assert!(there.dns_to(ChangeEffect::Restart).all(|dn| dns.contains(dn)));
        prop_assert_eq!(dns, new.active_services().map(|planned| planned.dn.as_str()).collect::<BTreeSet<_>>());
        let back = compare_plans(&new, &old);
        let restarts = |difference: &PlanDifference| {
            difference.dns_to(ChangeEffect::Restart).map(str::to_owned).collect::<BTreeSet<_>>()
        };
        prop_assert_eq!(restarts(&there), restarts(&back));
        // Every runnable that stops is in one wave, after all that depend on it.
        let stopping: BTreeSet<&str> =
            [ChangeEffect::Restart, ChangeEffect::Remove].into_iter().flat_map(|e| there.dns_to(e)).collect();
        let waves = stop_waves(&old, stopping.clone());
        let position = |dn: &str| waves.iter().position(|wave| wave.iter().any(|known| known == dn));
        prop_assert_eq!(waves.iter().flatten().count(), stopping.len());
        for planned in old.active_services().filter(|planned| stopping.contains(planned.dn.as_str())) {
            for dependency in planned.start_after.iter().filter(|dn| stopping.contains(dn.as_str())) {
                prop_assert!(position(&planned.dn) < position(dependency));
            }
        }
    }
}

/// Up to five services; each may depend on those before it, and has one of three grace periods.
fn configuration() -> impl Strategy<Value = String> {
    proptest::collection::vec((any::<bool>(), 1..4_u8, any::<[bool; 5]>()), 5).prop_map(|services| {
        let mut names: Vec<String> = Vec::new();
        let mut text = String::new();
        for (index, (exists, grace, depends)) in services.into_iter().enumerate() {
            if exists {
                let name = format!("s{index}");
                let wanted = names.iter().zip(depends).filter(|(_, depends)| *depends);
                let list: Vec<_> = wanted.map(|(name, _)| format!("{name:?}")).collect();
                text += &service(&name, &format!("grace = \"{grace}s\"\ndepends_on = [{}]", list.join(", ")));
                names.push(name);
            }
        }
        text
    })
}
