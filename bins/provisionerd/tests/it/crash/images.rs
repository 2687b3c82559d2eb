//! Claims for block and strict volumes.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{DeleteParams, Patch, PatchParams};
use nodekeel_provisioner::{IMAGE_FILE, KIND_ATTRIBUTE, SELECTED_NODE};
use serde_json::json;

use super::ClaimScenario;
use super::leak_counts::LeakCounts;
use super::matrix::{STRICT_CLASS, XFS_CLASS};
use super::run::CrashRun;
use super::scenarios::is_bound;
use crate::cluster::{claims_api, create_object, volumes_api, wait_object};

/// Where a pod writes: behind what the file system has at its beginning.
const PLACE: u64 = 7 << 20;

/// The sizes of a volume before and after its expansion, in MiB.
fn sizes(scenario: ClaimScenario) -> [u64; 2] {
    if scenario == ClaimScenario::StrictXfs { [300, 320] } else { [8, 16] }
}

impl CrashRun {
    /// Creates a claim for a block or strict volume, writes into the volume, expands it, and deletes both.
    pub(super) async fn use_image(mut self, scenario: ClaimScenario) -> LeakCounts {
        let claim = self.create_image_claim(scenario).await;
        let volume = format!("pvc-{}", claim.metadata.uid.as_deref().expect("a UID"));
        let (claims, volumes) = (claims_api(&self.client), volumes_api(&self.client));
        let name = self.name.clone();
        let doubles = match scenario {
            ClaimScenario::StrictAbandoned => {
                self.wait_killed().await;
                self.count_volumes().await.max(1) - 1
            }
            _ => self.write_and_expand(scenario, &volume).await,
        };
        claims.delete(&name, &DeleteParams::default()).await.expect("the claim is deleted");
        if scenario == ClaimScenario::StrictAbandoned {
            wait_object(&claims, &name, |claim| claim.is_none()).await;
            self.restart("");
        }
        // Whether there is a PersistentVolume of it or not. The last process may not have swept yet.
        for place in ["volumes", ".new", ".unpublished", "kinds"] {
            self.wait_missing(place, |_| true).await;
        }
        self.wait_through_kill(wait_object(&volumes, &volume, |volume| volume.is_none())).await;
        if self.kills == 0 {
            self.wait_for_kill().await;
        }
        self.terminate().await;
        self.count_leftovers(doubles).await
    }

    async fn create_image_claim(&self, scenario: ClaimScenario) -> PersistentVolumeClaim {
        let (mode, class) = match scenario {
            ClaimScenario::Block => ("Block", "nodekeel"),
            ClaimScenario::StrictXfs => ("Filesystem", XFS_CLASS),
            _ => ("Filesystem", STRICT_CLASS),
        };
        let claim = json!({
            "metadata": { "name": self.name, "annotations": { SELECTED_NODE: self.program.node } },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": format!("{}Mi", sizes(scenario)[0]) } },
                "storageClassName": class,
                "volumeMode": mode,
            },
        });
        create_object(&claims_api(&self.client), claim).await
    }

    /// Returns the number of surplus volumes.
    async fn write_and_expand(&mut self, scenario: ClaimScenario, volume: &str) -> usize {
        let (claims, volumes) = (claims_api(&self.client), volumes_api(&self.client));
        let name = self.name.clone();
        self.wait_through_kill(wait_object(&claims, &name, is_bound)).await;
        let image = self.image_of(volume);
        let file = fs::File::options().read(true).write(true).open(&image).expect("the image");
        file.write_all_at(b"data", PLACE).expect("it has its size");
        let [_, mebibytes] = sizes(scenario);
        let size = format!("{mebibytes}Mi");
        let request = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
        claims.patch(&name, &PatchParams::default(), &Patch::Merge(request)).await.expect("a patch");
        let is_expanded = |claim: Option<&PersistentVolumeClaim>| {
            let status = claim.and_then(|claim| claim.status.as_ref());
            status.is_some_and(|status| {
                status.capacity.as_ref().is_some_and(|capacity| capacity["storage"].0 == size)
                    && status.allocated_resource_statuses.is_none()
                    && status.conditions.is_none()
            })
        };
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

    fn image_of(&self, volume: &str) -> PathBuf {
        self.program.base.path().join("volumes").join(volume).join(IMAGE_FILE)
    }
}
