#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use proptest::prelude::*;

use super::*;

/// An entry in memory, with its own entries if it is a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Node {
    facts: EntryFacts,
    entries: Vec<Node>,
}

/// Every project that is the mark of a directory.
fn owned_projects(node: &Node, owned: &mut HashSet<u32>) {
    if let MarkHolder::Itself(project) = node.facts.mark {
        owned.insert(project);
    }
    node.entries.iter().for_each(|entry| owned_projects(entry, owned));
}

/// Audits and repairs a tree; returns the findings, and how many entries were repaired.
fn audit(node: &mut Node, scope: Scope, projects: &KnownProjects) -> (Vec<FindingKind>, usize) {
    let judged = judge_entry(node.facts, scope, projects);
    let mut findings: Vec<_> = judged.finding.into_iter().collect();
    let mut repaired = 0;
    if let Some(tag) = judged.repair {
        node.facts.tag = tag;
        repaired += 1;
    }
    for entry in &mut node.entries {
        let (found, count) = audit(entry, judged.below, projects);
        findings.extend(found);
        repaired += count;
    }
    (findings, repaired)
}

/// An entry as it should be left. It is in a limited directory, in an unowned one, or in none.
fn check_repaired(before: &Node, after: &Node, limit: Option<u32>, projects: &KnownProjects) {
    let (was, is) = (before.facts, after.facts);
    assert_eq!((was.mark, was.is_directory), (is.mark, is.is_directory), "only tags change");
    let mut below = limit;
    if let MarkHolder::Itself(project) = was.mark {
        assert_eq!(is.tag, ProjectTag { project, inherit: true });
        below = Some(project);
    } else if is_of_others(was, limit, projects) {
        assert_eq!(is.tag, was.tag, "projects of others stay");
        // What others limit is theirs.
        return;
    } else if let Some(project) = limit {
        assert_eq!(is.tag.project, project);
        assert!(is.tag.inherit || !is.is_directory, "new entries would escape");
    } else {
        assert_eq!(is.tag.project, 0, "it counts for a directory elsewhere");
    }
    for (before, after) in before.entries.iter().zip(&after.entries) {
        check_repaired(before, after, below, projects);
    }
}

fn is_of_others(facts: EntryFacts, limit: Option<u32>, projects: &KnownProjects) -> bool {
    let number = facts.tag.project;
    let is_unowned = number != 0 && !projects.owned.contains(&number);
    is_unowned && (limit.is_none() || facts.is_directory && projects.limited.contains(&number))
}

/// Marks of two directories name different projects: those that an earlier one of the tree has are removed.
fn remove_double_marks(node: &mut Node, seen: &mut HashSet<u32>) {
    if let MarkHolder::Itself(project) = node.facts.mark
        && !seen.insert(project)
    {
        node.facts.mark = MarkHolder::Another;
    }
    node.entries.iter_mut().for_each(|entry| remove_double_marks(entry, seen));
}

fn any_node() -> impl Strategy<Value = Node> {
    // Few projects, so that entries of one meet; 7 is limited by another program, 8 by none.
    let project = prop_oneof![Just(0), 1..4_u32, 7..9_u32];
    let tag = (project, any::<bool>()).prop_map(|(project, inherit)| ProjectTag { project, inherit });
    let mark = prop_oneof![
        4 => Just(MarkHolder::Nobody),
        1 => Just(MarkHolder::Another),
        2 => (1..4_u32).prop_map(MarkHolder::Itself),
    ];
    let file = tag
        .clone()
        .prop_map(|tag| Node { facts: EntryFacts { tag, ..EntryFacts::default() }, entries: Vec::new() });
    file.prop_recursive(5, 40, 6, move |entry| {
        (tag.clone(), mark.clone(), prop::collection::vec(entry, 0..6)).prop_map(|(tag, mark, entries)| {
            Node { facts: EntryFacts { tag, mark, is_directory: true }, entries }
        })
    })
}

proptest! {
    #[test]
    fn a_repaired_entry_counts_for_its_directory_and_limits_of_others_stay(mut tree in any_node()) {
        remove_double_marks(&mut tree, &mut HashSet::new());
        let mut projects = KnownProjects { limited: HashSet::from([1, 2, 3, 7]), ..KnownProjects::default() };
        owned_projects(&tree, &mut projects.owned);
        let before = tree.clone();
        let (findings, repaired) = audit(&mut tree, Scope::Free, &projects);
        prop_assert!(repaired <= findings.len(), "all that changes is reported");
        prop_assert_eq!(repaired == 0, tree == before);
        check_repaired(&before, &tree, None, &projects);
        let repaired_tree = tree.clone();
        let (findings, repaired) = audit(&mut tree, Scope::Free, &projects);
        prop_assert_eq!((repaired, &tree), (0, &repaired_tree), "a second repair changes nothing");
        for kind in findings {
            // An escape from what others limit is theirs to repair.
            prop_assert!(!matches!(kind, FindingKind::MovedOut | FindingKind::Copied), "{kind:?}");
        }
    }
}

/// Projects 3 and 7 are limited; the owner of 3 is known or not.
fn projects(has_owner: bool) -> KnownProjects {
    let owned = has_owner.then_some(3).into_iter().collect();
    KnownProjects { owned, limited: HashSet::from([3, 7]) }
}

fn directory(project: u32, mark: MarkHolder) -> EntryFacts {
    EntryFacts { tag: ProjectTag { project, inherit: project != 0 }, mark, is_directory: true }
}

#[test]
fn moves_copies_and_restores_are_distinguished_by_the_mark() {
    let kind = |entry, has_owner| judge_entry(entry, Scope::Free, &projects(has_owner)).finding;
    assert_eq!(kind(directory(3, MarkHolder::Nobody), true), Some(FindingKind::MovedOut));
    assert_eq!(kind(directory(3, MarkHolder::Another), true), Some(FindingKind::Copied));
    assert_eq!(kind(directory(3, MarkHolder::Another), false), Some(FindingKind::Restored));
    assert_eq!(kind(directory(3, MarkHolder::Nobody), false), Some(FindingKind::Unowned));
    assert_eq!(kind(directory(3, MarkHolder::Itself(3)), true), None, "an owner may lie anywhere");
}

#[test]
fn an_owner_that_left_its_own_project_returns_and_so_do_its_entries() {
    let judged = judge_entry(directory(0, MarkHolder::Itself(3)), Scope::Free, &projects(true));
    assert_eq!(judged.finding, Some(FindingKind::Escaped));
    assert_eq!(judged.repair, Some(ProjectTag { project: 3, inherit: true }));
    assert_eq!(judged.below, Scope::Limited { project: 3, is_owned: true });
}

#[test]
fn a_directory_whose_new_entries_would_escape_is_found() {
    let entry = EntryFacts {
        tag: ProjectTag { project: 3, inherit: false },
        mark: MarkHolder::Nobody,
        is_directory: true,
    };
    let scope = Scope::Limited { project: 3, is_owned: true };
    assert_eq!(judge_entry(entry, scope, &projects(true)).finding, Some(FindingKind::Escaped));
    let file = EntryFacts { is_directory: false, ..entry };
    assert_eq!(judge_entry(file, scope, &projects(true)).finding, None, "only directories pass it on");
}

/// Any user can give a file that it owns any project.
#[test]
fn an_entry_with_a_project_that_nothing_limits_has_escaped() {
    let scope = Scope::Limited { project: 3, is_owned: true };
    for (number, is_directory, finding) in [
        (1, false, FindingKind::Escaped),
        (1, true, FindingKind::Escaped),
        (7, false, FindingKind::Escaped),
        (7, true, FindingKind::Unowned),
    ] {
        let entry = EntryFacts { is_directory, ..directory(number, MarkHolder::Nobody) };
        let judged = judge_entry(entry, scope, &projects(true));
        assert_eq!(judged.finding, Some(finding), "{number} {is_directory}");
        assert_eq!(judged.repair.is_some(), finding == FindingKind::Escaped);
    }
}

#[test]
fn entries_of_an_unowned_directory_are_counted_with_it() {
    let scope = Scope::Limited { project: 7, is_owned: false };
    let file = EntryFacts { tag: ProjectTag { project: 7, inherit: false }, ..EntryFacts::default() };
    let judged = judge_entry(file, scope, &projects(false));
    assert!(judged.is_in_unowned && judged.finding.is_none() && judged.repair.is_none(), "{judged:?}");
    let escaped = judge_entry(EntryFacts::default(), scope, &projects(false));
    assert_eq!((escaped.finding, escaped.repair), (Some(FindingKind::Escaped), None));
}
