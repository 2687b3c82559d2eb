//! The enrolment configuration and the journal, cut at every byte.

use std::fs;

use nodekeel_cluster::consensus::memory::MemoryNet;
use nodekeel_cluster::machine::{Reason, StepError};

use super::bed::{Bed, said};
use crate::nodes::ticket;

#[tokio::test]
async fn a_cut_enrolment_configuration_is_an_error_that_names_it_and_nothing_is_founded() {
    let net = MemoryNet::new();
    let bed = Bed::on(&net, "192.0.2.7");
    let whole = ticket("192.0.2.7").to_config();
    let file = bed.disks.path().join("esp/enrolment.pb");
    // Every cut is tried on the file itself; a whole run at some of them, and where nothing is left.
    let enrolment = bed.deps().enrolment;
    let mut runs = 0;
    for length in 0..whole.len() {
        fs::write(&file, &whole[..length]).expect("it is written");
        let error = said(enrolment.load().expect_err("it is cut"));
        assert!(error.contains("esp/enrolment.pb"), "cut at {length}: {error}");
        if length % 97 == 0 {
            let reason = bed.fails().await;
            let Reason::Step { source, .. } = &reason else { panic!("cut at {length}: {reason:?}") };
            assert!(matches!(**source, StepError::Enrolment(_)), "cut at {length}: {source:?}");
            runs += 1;
        }
        assert_eq!(fs::read(&file).expect("it is there"), &whole[..length], "it stays as it is");
    }
    assert_eq!(net.clusters(), 0);
    assert_eq!(fs::read_dir(bed.disks.path().join("data")).expect("it is there").count(), 0);
    println!("{} cuts, {runs} of them with a run", whole.len());
}

/// The journal's files, that with the newest record first.
fn newest_first(bed: &Bed) -> [std::path::PathBuf; 2] {
    let generation = |path: &std::path::PathBuf| {
        let bytes = fs::read(path).expect("it is there");
        u64::from_le_bytes(bytes[16..24].try_into().expect("a generation"))
    };
    let mut files = ["enrolment.0", "enrolment.1"].map(|name| bed.disks.path().join("esp").join(name));
    files.sort_by_key(|file| std::cmp::Reverse(generation(file)));
    files
}

#[tokio::test]
async fn a_journal_cut_at_any_byte_goes_on_from_the_record_before_to_the_same_node() {
    let net = MemoryNet::new();
    let bed = Bed::on(&net, "192.0.2.7");
    let (life, first) = bed.runs().await;
    life.end().await;
    let [newest, older] = newest_first(&bed);
    let (whole, before) = (fs::read(&newest).expect("it is there"), fs::read(&older).expect("it is there"));
    for length in 0..whole.len() {
        fs::write(&newest, &whole[..length]).expect("it is written");
        fs::write(&older, &before).expect("it is written");
        let (life, again) = bed.runs().await;
        assert_eq!(again, first, "cut at {length}");
        life.end().await;
    }
    assert_eq!(net.clusters(), 1);
    println!("{} cuts", whole.len());
}

#[tokio::test]
async fn a_journal_with_both_records_cut_is_an_error_that_names_it_and_nothing_is_destroyed() {
    let net = MemoryNet::new();
    let bed = Bed::on(&net, "192.0.2.7");
    let (life, first) = bed.runs().await;
    life.end().await;
    let [newest, older] = newest_first(&bed);
    let (whole, before) = (fs::read(&newest).expect("it is there"), fs::read(&older).expect("it is there"));
    let key = bed.disks.path().join("data/node/credentials/cert-key.pem");
    let kept = fs::read(&key).expect("it is there");
    let shorter = whole.len().min(before.len());
    for length in 1..shorter {
        fs::write(&newest, &whole[..length]).expect("it is written");
        fs::write(&older, &before[..length]).expect("it is written");
        let reason = bed.fails().await;
        let text = said(reason);
        assert!(text.contains("esp/enrolment.0"), "cut at {length}: {text}");
        assert_eq!(fs::read(&key).expect("it is there"), kept);
    }
    // With nothing of it left, there is still the data, which is refused.
    fs::write(&newest, b"").expect("it is written");
    fs::write(&older, b"").expect("it is written");
    bed.fails().await;
    assert_eq!(fs::read(&key).expect("it is there"), kept);
    assert_eq!(net.clusters(), 1);
    // What was cut can be restored.
    for name in ["enrolment.0", "enrolment.1"] {
        fs::remove_file(bed.disks.path().join("esp").join(name)).expect("it is removed");
    }
    fs::write(&newest, &whole).expect("it is written");
    fs::write(&older, &before).expect("it is written");
    let (life, again) = bed.runs().await;
    assert_eq!(again, first);
    life.end().await;
    println!("{shorter} cuts");
}
