//! A node whose key the TPM of a guest has sealed: rebooted, refused when another system was booted, and sealed again.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};

use nodekeel_node::v1::{
    ConfirmRecoveryPassphraseRequest, RotateStorageKeysRequest, StorageResponse, UnlockStorageRequest,
};
use sha2::{Digest as _, Sha256};
use tonic::Code;

use crate::harness::check;
use crate::storage_cluster::{VolumeMember, wait_running};
use crate::storage_device::DeviceFixture;
use crate::storage_keys::{add_recovery, key_conditions};

/// A PCR that no firmware extends.
const DEBUG_PCR: u8 = 16;

const SEALED: &str = "encryption = \"encrypted\"\nkeys = \"local\"\nseal = \"tpm\"\ntpm_pcrs = [7, 16]\n";

/// Extends the PCR, as the firmware does with what it starts: TPM2_PCR_Extend with an empty password, and one digest of
/// SHA-256.
fn extend_pcr(number: u8, digest: &[u8; 32]) {
    let body =
        [&[0, 0, 0, number][..], &[0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0], &[0, 0, 0, 1, 0, 11], digest]
            .concat();
    let length = u32::try_from(10 + body.len()).unwrap();
    let command = [&[0x80, 2][..], &length.to_be_bytes(), &0x182_u32.to_be_bytes(), &body].concat();
    let mut tpm = File::options().read(true).write(true).open("/dev/tpmrm0").unwrap();
    tpm.write_all(&command).unwrap();
    let mut response = [0; 256];
    let count = tpm.read(&mut response).unwrap();
    assert_eq!(response[6..10], [0; 4], "{:?}", &response[..count]);
}

/// The keys of the node in `esp/`.
fn sealed_keys(fixture: &DeviceFixture) -> Vec<String> {
    let entries = fs::read_dir(fixture.data().join("esp")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let ends = names.filter_map(|name| Some(name.rsplit_once('.')?.1.to_owned()));
    ends.filter(|end| end == "tpm" || end == "key").collect()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB, etcd, tpm and 2 GiB of memory"]
async fn a_member_whose_pcr_has_changed_names_it_and_is_sealed_again_by_its_passphrase() {
    let member = VolumeMember::new(SEALED).await;
    let mut node = member.start().await;
    let running = wait_running(&mut node).await;
    let passphrase = Some(add_recovery(&mut node).await);
    let confirm = ConfirmRecoveryPassphraseRequest { passphrase: passphrase.clone() };
    node.client.confirm_recovery_passphrase(confirm).await.unwrap();
    assert_eq!(sealed_keys(&member.fixture), ["tpm"]);
    node.stop().await;
    assert!(!member.fixture.is_open(), "a stop closes the volume");
    let mut node = member.start().await;
    let again = wait_running(&mut node).await;
    assert_eq!((&again.node, &again.cluster), (&running.node, &running.cluster));
    assert_eq!(key_conditions(&mut node).await, [""; 0]);
    node.stop().await;

    extend_pcr(DEBUG_PCR, &[7; 32]);
    let mut node = member.start().await;
    let status = node.wait_status(|status: &StorageResponse| status.state == "locked").await;
    let why = "PCRs 16 have changed since the key was sealed: find out what was booted";
    assert!(status.detail.contains(why), "{status:?}");
    let (problem, hint) = node.storage_health().await;
    assert!(problem.contains(why) && hint == "`nodectl storage unlock`", "{problem}; {hint}");
    node.client.unlock_storage(UnlockStorageRequest { passphrase: passphrase.clone() }).await.unwrap();
    let again = wait_running(&mut node).await;
    assert_eq!((&again.node, &again.cluster), (&running.node, &running.cluster));
    let conditions = key_conditions(&mut node).await;
    assert!(conditions.len() == 1 && conditions[0].contains("may not open it"), "{conditions:?}");
    let refused = node.client.rotate_storage_keys(RotateStorageKeysRequest::default()).await.unwrap_err();
    assert!(
        refused.code() == Code::FailedPrecondition && refused.message().contains("PCRs 16 have changed"),
        "{refused:?}"
    );
    node.client.rotate_storage_keys(RotateStorageKeysRequest { passphrase }).await.unwrap();
    assert_eq!(key_conditions(&mut node).await, [""; 0]);
    assert_eq!(sealed_keys(&member.fixture), ["tpm"]);
    node.stop().await;

    let mut node = member.start().await;
    let again = wait_running(&mut node).await;
    assert_eq!((again.node, again.cluster), (running.node, running.cluster));
    node.stop().await;
}

/// Files of systemd-measure: see the README of the directory.
const SIGNER: &str = include_str!("../../../../localstorage/testdata/tpm/signer.pem");
const KERNEL: &str = include_str!("../../../../localstorage/testdata/tpm/kernel-1.json");
const OTHER_SIGNER: &str = include_str!("../../../../localstorage/testdata/tpm/kernel-2-other-signer.json");

/// Extends PCR 11, as systemd-stub does with each section of an image, and systemd-pcrphase with the phases of a boot.
fn measure(texts: &[&str]) {
    for text in texts {
        extend_pcr(11, &Sha256::digest(text).into());
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB and tpm"]
async fn a_node_opens_its_volume_under_each_signed_system_and_names_what_is_not_signed() {
    let fixture = DeviceFixture::new(384).await;
    let [signer, signatures] =
        ["signer.pem", "signatures.json"].map(|name| fixture.scratch.path().join(name));
    fs::write(&signer, SIGNER).unwrap();
    fs::write(&signatures, KERNEL).unwrap();
    let keys = format!(
        "encryption = \"encrypted\"\nkeys = \"local\"\nseal = \"tpm\"\ntpm_public_key = {signer:?}\ntpm_signature = {signatures:?}\n"
    );
    // No key is sealed that the next start would not unseal.
    let mut node = fixture.start(&keys).await;
    let not_signed = "has no signature for the present values of PCRs 11: boot the signed kernel";
    let status = node.wait_status(|status: &StorageResponse| status.detail.contains(not_signed)).await;
    assert_eq!(sealed_keys(&fixture), [""; 0], "{status:?}");
    node.stop().await;
    measure(&[".linux\0", "kernel 1\n", ".osrel\0", "ID=node-os\n", "enter-initrd"]);
    let mut node = fixture.start(&keys).await;
    node.wait_open().await;
    fs::write(fixture.volume().join("witness"), "data").unwrap();
    let passphrase = Some(add_recovery(&mut node).await);
    let confirm = ConfirmRecoveryPassphraseRequest { passphrase: passphrase.clone() };
    node.client.confirm_recovery_passphrase(confirm).await.unwrap();
    node.stop().await;

    // Another system, which is signed, too.
    measure(&["leave-initrd", "sysinit"]);
    let text = fixture.check(&keys);
    assert!(text.contains("with its TPM and PCRs 11 that a key has signed"), "{text}");
    let node = fixture.start(&keys).await;
    node.wait_open().await;
    assert_eq!(fs::read_to_string(fixture.volume().join("witness")).unwrap(), "data");
    node.stop().await;

    // One that is not, and signatures of another key.
    measure(&["ready"]);
    fs::write(&signatures, OTHER_SIGNER).unwrap();
    let checked = check(fixture.scratch.path(), &fixture.config(&keys), &[]);
    assert!(checked.code == Some(4) && checked.stdout.contains("storage.tpm_signature: "), "{checked:?}");
    let mut node = fixture.start(&keys).await;
    let status = node.wait_status(|status: &StorageResponse| status.state == "locked").await;
    assert!(status.detail.contains("has no signature by the public key with fingerprint"), "{status:?}");
    node.stop().await;
    fs::write(&signatures, KERNEL).unwrap();
    let mut node = fixture.start(&keys).await;
    let status = node.wait_status(|status: &StorageResponse| status.state == "locked").await;
    assert!(status.detail.contains(not_signed), "{status:?}");
    let (problem, hint) = node.storage_health().await;
    assert!(problem.contains(not_signed) && hint == "`nodectl storage unlock`", "{problem}; {hint}");
    node.client.unlock_storage(UnlockStorageRequest { passphrase: passphrase.clone() }).await.unwrap();
    node.wait_open().await;
    let refused = node.client.rotate_storage_keys(RotateStorageKeysRequest { passphrase }).await.unwrap_err();
    assert!(
        refused.code() == Code::FailedPrecondition && refused.message().contains(not_signed),
        "{refused:?}"
    );
    assert_eq!(sealed_keys(&fixture), ["tpm"]);
    node.stop().await;
}
