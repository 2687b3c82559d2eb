//! The enrolment configuration and the journal, truncated at every byte.

use std::fs;

use nodekeel_cluster::consensus::memory::MemoryNetwork;
use nodekeel_cluster::enrolment::{FailureReason, StepError};

use super::node_fixture::{NodeFixture, error_chain};
use crate::nodes::test_ticket;

#[tokio::test]
async fn a_truncated_enrolment_config_is_an_error_that_names_the_file_and_bootstraps_nothing() {
    let network = MemoryNetwork::new();
    let fixture = NodeFixture::on_network(&network, "192.0.2.7");
    let whole = test_ticket("192.0.2.7").to_config();
    let file = fixture.disks.path().join("esp/enrolment.pb");
    // Every length is tried on the file itself, and some in a whole run.
    let enrolment = fixture.deps().enrolment;
    let mut runs = 0;
    for length in 0..whole.len() {
        fs::write(&file, &whole[..length]).expect("written");
        let error = error_chain(enrolment.load_ticket().expect_err("a truncated ticket"));
        assert!(error.contains("esp/enrolment.pb"), "cut at {length}: {error}");
        if length % 97 == 0 {
            let reason = fixture.run_to_failure().await;
            let FailureReason::ActionFailed { source, .. } = &reason else {
                panic!("cut at {length}: {reason:?}")
            };
            assert!(matches!(**source, StepError::EnrolmentConfig(_)), "cut at {length}: {source:?}");
            runs += 1;
        }
        assert_eq!(fs::read(&file).expect("the file exists"), &whole[..length], "the file was changed");
    }
    assert_eq!(network.created_count(), 0);
    assert_eq!(fs::read_dir(fixture.disks.path().join("data")).expect("it exists").count(), 0);
    println!("{} cuts, {runs} of them with a run", whole.len());
}

/// The journal's files, the one with the newest record first.
fn newest_first(fixture: &NodeFixture) -> [std::path::PathBuf; 2] {
    let generation = |path: &std::path::PathBuf| {
        let bytes = fs::read(path).expect("it exists");
        u64::from_le_bytes(bytes[16..24].try_into().expect("a generation"))
    };
    let mut files = ["enrolment.0", "enrolment.1"].map(|name| fixture.disks.path().join("esp").join(name));
    files.sort_by_key(|file| std::cmp::Reverse(generation(file)));
    files
}

/// The length of a record, without what follows it in its file.
fn record_bytes(slot: &[u8]) -> usize {
    28 + u32::from_le_bytes(slot[12..16].try_into().expect("a length")) as usize
}

#[tokio::test]
async fn a_truncated_journal_resumes_from_its_previous_record_as_the_same_node() {
    let network = MemoryNetwork::new();
    let fixture = NodeFixture::on_network(&network, "192.0.2.7");
    let (run, first) = fixture.run_to_running().await;
    run.stop().await;
    let [newest, older] = newest_first(&fixture);
    let (whole, before) = (fs::read(&newest).expect("it exists"), fs::read(&older).expect("it exists"));
    let cuts = record_bytes(&whole);
    for length in 0..cuts {
        fs::write(&newest, &whole[..length]).expect("written");
        fs::write(&older, &before).expect("written");
        let (run, again) = fixture.run_to_running().await;
        assert_eq!(again, first, "cut at {length}");
        run.stop().await;
    }
    assert_eq!(network.created_count(), 1);
    println!("{cuts} cuts");
}

#[tokio::test]
async fn a_journal_with_both_records_truncated_is_an_error_that_names_it_and_destroys_nothing() {
    let network = MemoryNetwork::new();
    let fixture = NodeFixture::on_network(&network, "192.0.2.7");
    let (run, first) = fixture.run_to_running().await;
    run.stop().await;
    let [newest, older] = newest_first(&fixture);
    let (whole, before) = (fs::read(&newest).expect("it exists"), fs::read(&older).expect("it exists"));
    let key = fixture.disks.path().join("data/node/credentials/cert-key.pem");
    let kept = fs::read(&key).expect("it exists");
    let shorter = record_bytes(&whole).min(record_bytes(&before));
    for length in 0..shorter {
        fs::write(&newest, &whole[..length]).expect("written");
        fs::write(&older, &before[..length]).expect("written");
        let reason = fixture.run_to_failure().await;
        let text = error_chain(reason);
        assert!(text.contains("esp/enrolment.0"), "cut at {length}: {text}");
        assert_eq!(fs::read(&key).expect("it exists"), kept);
    }
    assert_eq!(network.created_count(), 1);
    // The truncated files can be restored.
    for name in ["enrolment.0", "enrolment.1"] {
        fs::remove_file(fixture.disks.path().join("esp").join(name)).expect("removed");
    }
    fs::write(&newest, &whole).expect("written");
    fs::write(&older, &before).expect("written");
    let (run, again) = fixture.run_to_running().await;
    assert_eq!(again, first);
    run.stop().await;
    println!("{shorter} cuts");
}
