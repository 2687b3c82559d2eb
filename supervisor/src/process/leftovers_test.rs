use super::*;
use crate::process::mark::{HostId, ProcessMark};
use proptest::prelude::*;

fn host_id(number: u32) -> HostId {
    HostId::parse(&format!("7-{number:x}")).expect("a host id")
}

/// The mark of a start of a host.
fn mark(host: u32, survives: bool, start: u64) -> ProcessMark {
    let host = u64::from(host) << 24 | 7 << 46 | 1 << 61;
    ProcessMark::from_limit(host | u64::from(survives) << 23 | start).expect("a mark")
}

/// The user as which the recorded processes were started.
const USER: u32 = 7;

fn boot(number: u8) -> BootId {
    BootId { boot: format!("boot {number}"), pid_namespace: "pid:[1]".to_owned() }
}

fn host_record(host: u32, start: u64, boot_number: u8) -> Record {
    Record::Host(HostRecord { boot: boot(boot_number), host_id: host_id(host), start, users: [USER].into() })
}

fn kept_record(dn: &str, mark: ProcessMark, process: Option<ProcessId>) -> KeptRecord {
    KeptRecord {
        boot: boot(1),
        dn: dn.to_owned(),
        mark,
        user: USER,
        definition: 0,
        cgroup: None,
        process,
        is_ready: false,
    }
}

fn process(pid: i32, parent: i32, start: u64, limit: u64) -> ObservedProcess {
    ObservedProcess { id: ProcessId { pid, start }, parent, session: pid, limit, user: Some(USER) }
}

/// A process below a kept one's cgroup has a pid above 200.
fn is_in_its_cgroup(kept: &KeptRecord, process: ProcessId) -> bool {
    kept.cgroup.is_some() && process.pid > 200
}

/// The plan for these records, with `root.kept` expected, and the pids that it ends.
fn plan(records: Vec<Record>, observed: &[ObservedProcess]) -> (LeftoverPlan, Vec<i32>) {
    let named = records.into_iter().enumerate().map(|(index, record)| (index.to_string(), Ok(record)));
    let mut plan =
        LeftoverPlan::decide(named.collect(), &boot(1), |dn| dn == "root.kept", is_in_its_cgroup, observed);
    let mut pids: Vec<_> = plan.leftovers.find(observed).into_iter().map(|process| process.id.pid).collect();
    pids.sort_unstable();
    (plan, pids)
}

#[test]
fn a_kept_process_stays_if_it_is_expected_and_is_the_recorded_one() {
    let mark_of_kept = mark(5, true, 1);
    let main = process(100, 1, 50, mark_of_kept.as_limit());
    let child = process(101, 100, 51, mark_of_kept.as_limit());
    let observed = [main, child];
    for (dn, recorded, stays) in [
        ("root.kept", Some(main.id), true),
        ("root.other", Some(main.id), false),
        ("root.kept", Some(ProcessId { start: 49, ..main.id }), false),
        ("root.kept", None, false),
    ] {
        let record = kept_record(dn, mark_of_kept, recorded);
        let (plan, ended) = plan(vec![host_record(5, 10, 1), Record::Kept(record.clone())], &observed);
        let expected = if stays { (vec![record], vec![]) } else { (vec![], vec![100, 101]) };
        assert_eq!((plan.kept, ended), expected, "{dn} {recorded:?}");
    }
    let second = kept_record("root.kept", mark(5, true, 2), Some(ProcessId { pid: 102, start: 52 }));
    let first = kept_record("root.kept", mark_of_kept, Some(main.id));
    let observed = [main, process(102, 1, 52, second.mark.as_limit())];
    let (plan, ended) = plan(vec![Record::Kept(first.clone()), Record::Kept(second)], &observed);
    assert_eq!((plan.kept, ended), (vec![first], vec![102]), "one DN has one process");
}

/// What else would tell it from any other process that has its pid in a forged record?
#[test]
fn a_process_that_does_not_match_its_record_is_left_alone() {
    let mark_of_kept = mark(5, true, 1);
    let limit = mark_of_kept.as_limit();
    for observed in [
        process(100, 1, 50, 1024),
        process(100, 1, 50, mark(5, true, 2).as_limit()),
        ObservedProcess { user: Some(USER + 1), ..process(100, 1, 51, limit) },
        ObservedProcess { user: None, ..process(100, 1, 51, limit) },
    ] {
        for dn in ["root.kept", "root.other"] {
            let record = kept_record(dn, mark_of_kept, Some(ProcessId { pid: 100, start: 50 }));
            let (plan, ended) = plan(vec![Record::Kept(record)], &[observed]);
            assert_eq!((plan.kept, ended), (vec![], vec![]), "{observed:?}");
            assert_eq!(plan.rejected.len(), usize::from(observed.id.start == 50), "{observed:?}");
        }
    }
}

/// It may have changed its mark, but it can't leave its cgroup.
#[test]
fn a_kept_process_in_its_cgroup_is_the_recorded_one() {
    let observed = [process(201, 1, 50, 1024)];
    let cgroup = Some("/sys/fs/cgroup/x".into());
    let record = KeptRecord { cgroup, ..kept_record("root.kept", mark(5, true, 1), Some(observed[0].id)) };
    let (plan, ended) = plan(vec![Record::Kept(record.clone())], &observed);
    assert_eq!((plan.kept, ended), (vec![record], vec![]));
}

#[test]
fn a_mark_ends_no_process_of_a_user_as_which_none_was_started() {
    let limit = mark(5, false, 1).as_limit();
    let of = |pid, user| ObservedProcess { user, ..process(pid, 1, 50, limit) };
    let observed = [of(100, Some(USER)), of(101, Some(USER + 1)), of(102, None)];
    assert_eq!(plan(vec![host_record(5, 10, 1)], &observed).1, [100]);
}

/// Its descendants keep its session or a parent, as whichever user they run.
#[test]
fn descendants_of_another_user_end_with_a_process_that_is_there() {
    let mark_of_kept = mark(5, true, 1);
    let of_other = |pid, parent, session, limit| ObservedProcess {
        user: Some(USER + 1),
        session,
        ..process(pid, parent, 50, limit)
    };
    let limit = mark_of_kept.as_limit();
    let main = process(100, 1, 50, limit);
    let below = [
        of_other(101, 100, 101, limit),
        of_other(102, 1, 100, limit),
        of_other(103, 1, 100, 1024),
        of_other(104, 102, 104, 1024),
    ];
    let orphan = of_other(105, 1, 99, limit);
    let of_another_kept = of_other(106, 100, 106, mark(5, true, 2).as_limit());
    let observed = [&[main][..], &below, &[orphan, of_another_kept]].concat();
    let record = kept_record("root.other", mark_of_kept, Some(main.id));
    let (plan, ended) = plan(vec![Record::Kept(record)], &observed);
    assert_eq!(ended, [100, 101, 102, 103, 104]);
    assert_eq!(plan.leftovers.unproven(&observed), [105], "it is named");
}

/// A pid may be that of a stranger's session by then.
#[test]
fn a_session_whose_leader_has_exited_proves_nothing() {
    let limit = mark(5, false, 1).as_limit();
    let of_other = ObservedProcess { user: Some(USER + 1), session: 100, ..process(101, 1, 50, limit) };
    let observed = [of_other, ObservedProcess { session: 100, ..process(102, 1, 50, 1024) }];
    let (plan, ended) = plan(vec![host_record(5, 10, 1)], &observed);
    assert_eq!(ended, [0; 0]);
    assert_eq!(plan.leftovers.unproven(&observed), [101]);
}

#[test]
fn records_of_another_boot_identify_nothing_and_are_removed() {
    let limit = mark(5, false, 1).as_limit();
    let kept = mark(5, true, 1);
    let observed = [process(100, 1, 50, limit), process(101, 1, 50, kept.as_limit())];
    let of_kept = KeptRecord { boot: boot(2), ..kept_record("root.kept", kept, Some(observed[1].id)) };
    let (plan, ended) = plan(vec![host_record(5, 10, 2), Record::Kept(of_kept)], &observed);
    assert_eq!((plan.kept, ended), (vec![], vec![]));
    assert_eq!((plan.obsolete.len(), plan.end_kept.len()), (1, 1));
}

#[test]
fn a_damaged_record_identifies_nothing_and_is_left_as_it_is() {
    let observed = [process(100, 1, 50, mark(5, false, 1).as_limit())];
    let records = vec![("host-7-5".to_owned(), Err("cut off".to_owned()))];
    let mut plan = LeftoverPlan::decide(records, &boot(1), |_| true, is_in_its_cgroup, &observed);
    assert_eq!(plan.leftovers.find(&observed), []);
    assert_eq!(plan.rejected, [("host-7-5".to_owned(), "cut off".to_owned())]);
    assert!(plan.obsolete.is_empty());
}

/// Limits of all kinds: none, marks of two hosts, one of which is recorded, and marks that survive.
fn any_limit() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(u64::MAX),
        (4..6_u32, any::<bool>(), 1..4_u64)
            .prop_map(|(host, survives, start)| mark(host, survives, start).as_limit()),
    ]
}

proptest! {
    /// Of any processes, exactly those end that carry the mark of the recorded host, which is 5, and are not older than
    /// it, with their descendants, except those that survive.
    #[test]
    fn only_marked_processes_and_their_descendants_end(
        drawn in proptest::collection::vec((any_limit(), 0..20_u64, 0..30_usize), 1..30),
    ) {
        // Each has a parent among those before it, or init. The pids ascend from 1 to find that init is spared.
        let observed: Vec<_> = drawn.iter().enumerate().map(|(index, (limit, start, parent))| {
            let parent = if *parent < index { *parent as i32 + 1 } else { 0 };
            process(index as i32 + 1, parent, *start, *limit)
        }).collect();
        let (_, ended) = plan(vec![host_record(5, 10, 1)], &observed);
        let mut expected: Vec<i32> = Vec::new();
        for one in &observed {
            let mark = ProcessMark::from_limit(one.limit);
            let is_marked = mark.is_some_and(|mark| mark.host_id() == host_id(5)) && one.id.start >= 10;
            let survives = mark.is_some_and(ProcessMark::survives);
            if (is_marked || expected.contains(&one.parent)) && !survives && one.id.pid > 1 {
                expected.push(one.id.pid);
            }
        }
        prop_assert_eq!(ended, expected);
    }
}
