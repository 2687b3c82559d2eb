//! Claims for block and strict volumes.

use std::fs;
use std::os::unix::fs::FileExt as _;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use nodekeel_provisioner::{IMAGE_FILE, KIND_ATTRIBUTE};
use serde_json::json;

use super::ClaimScenario;
use super::matrix::{STRICT_CLASS, XFS_CLASS};
use super::run::{CrashRun, LeakCounts};
use crate::client_cluster::{
    claims_api, delete_claim, has_capacity, patch_claim, volume_name, volumes_api, wait_bound, wait_object,
    wait_volume_gone,
};

/// Where a pod writes: behind what the file system has at its beginning.
const PLACE: u64 = 7 << 20;

/// The sizes of a volume before and after its expansion, in MiB.
fn sizes(scenario: ClaimScenario) -> [u64; 2] {
    if scenario == ClaimScenario::StrictXfs { [300, 320] } else { [8, 16] }
}

impl CrashRun {
    /// Creates a claim for a block or strict volume, writes into the volume, expands it, and deletes both.
    pub(super) async fn use_image(mut self, scenario: ClaimScenario) -> LeakCounts {
        let client = self.client.clone();
        let claim = self.create_image_claim(scenario).await;
        let volume = volume_name(&claim);
        let claims = claims_api(&client);
        let name = self.name.clone();
        let doubles = match scenario {
            ClaimScenario::StrictAbandoned => {
                self.wait_killed().await;
                self.count_volumes().await.max(1) - 1
            }
            _ => self.write_and_expand(scenario, &volume).await,
        };
        delete_claim(&client, &name).await;
        if scenario == ClaimScenario::StrictAbandoned {
            wait_object(&claims, &name, |claim| claim.is_none()).await;
            self.restart("");
        }
        // With or without a PersistentVolume. The last process may not have swept yet.
        for place in ["volumes", ".new", ".unpublished", "kinds"] {
            self.wait_missing(place, |_| true).await;
        }
        self.wait_through_kill(wait_volume_gone(&client, &volume)).await;
        self.wait_for_kill().await;
        self.end(doubles).await
    }

    async fn create_image_claim(&self, scenario: ClaimScenario) -> PersistentVolumeClaim {
        let (mode, class) = match scenario {
            ClaimScenario::Block => ("Block", "nodekeel"),
            ClaimScenario::StrictXfs => ("Filesystem", XFS_CLASS),
            _ => ("Filesystem", STRICT_CLASS),
        };
        let patch = json!({ "spec": {
            "resources": { "requests": { "storage": format!("{}Mi", sizes(scenario)[0]) } },
            "storageClassName": class,
            "volumeMode": mode,
        } });
        self.create_claim(&self.name, patch).await
    }

    /// Returns the number of surplus volumes.
    async fn write_and_expand(&mut self, scenario: ClaimScenario, volume: &str) -> usize {
        let client = self.client.clone();
        let (claims, volumes) = (claims_api(&client), volumes_api(&client));
        let name = self.name.clone();
        self.wait_through_kill(wait_bound(&client, &name)).await;
        let image = self.program.file_of(volume).with_file_name(IMAGE_FILE);
        let file = fs::File::options().read(true).write(true).open(&image).expect("the image");
        file.write_all_at(b"data", PLACE).expect("it has its size");
        let [_, mebibytes] = sizes(scenario);
        let size = format!("{mebibytes}Mi");
        let request = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
        patch_claim(&client, &name, request).await;
        let is_expanded = |claim: Option<&_>| has_capacity(claim, &size);
        self.wait_through_kill(wait_object(&claims, &name, is_expanded)).await;
        let mut data = [0; 4];
        file.read_exact_at(&mut data, PLACE).expect("read");
        assert_eq!((&data, file.metadata().expect("metadata").len()), (b"data", mebibytes << 20), "{name}");
        let object = volumes.get(volume).await.expect("the volume").spec.and_then(|spec| spec.csi);
        let kind = match scenario {
            ClaimScenario::Block => "block",
            ClaimScenario::StrictXfs => "xfs",
            _ => "ext4",
        };
        let attributes = object.and_then(|csi| csi.volume_attributes).expect("attributes");
        assert_eq!(attributes[KIND_ATTRIBUTE], kind, "{name}");
        let mark = fs::read_to_string(self.program.base.path().join("kinds").join(volume));
        assert_eq!(mark.expect("a mark"), format!("{kind}\n"), "{name}");
        self.count_volumes().await.max(self.program.list_names("volumes").len()) - 1
    }
}
