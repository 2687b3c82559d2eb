//! Random orders of calls, compared with a model.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd as _;

use nodekeel_provisioner::csi::FileId;
use nodekeel_provisioner::csi::proto::csi::volume_capability::access_mode::Mode;
use nodekeel_provisioner::csi::testing::MemMounter;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tonic::Code;

use super::harness::{TestClient, TestPlugin, id, publish_message};

const PODS: [&str; 3] = ["a", "b", "c"];

/// How many volumes exist; one more id does not.
const VOLUMES: usize = 2;

#[derive(Debug, Clone, Copy)]
enum NodeCall {
    Publish { volume: usize, pod: usize, is_read_only: bool, is_exclusive: bool },
    Unpublish { volume: usize, pod: usize },
    Stats { volume: usize, pod: usize },
}

fn call_strategy() -> impl Strategy<Value = NodeCall> {
    let (volume, pod) = (0..=VOLUMES, 0..PODS.len());
    prop_oneof![
        3 => (volume.clone(), pod.clone(), any::<bool>(), any::<bool>()).prop_map(
            |(volume, pod, is_read_only, is_exclusive)| NodeCall::Publish { volume, pod, is_read_only, is_exclusive }
        ),
        2 => (volume.clone(), pod.clone()).prop_map(|(volume, pod)| NodeCall::Unpublish { volume, pod }),
        1 => (volume, pod).prop_map(|(volume, pod)| NodeCall::Stats { volume, pod }),
    ]
}

/// The expected mounts: for each pod the volume, and whether it is read-only.
#[derive(Debug, Default)]
struct MountModel(BTreeMap<usize, (usize, bool)>);

impl MountModel {
    fn apply_call(&mut self, call: NodeCall) -> Result<(), Code> {
        match call {
            NodeCall::Publish { volume, .. } | NodeCall::Stats { volume, .. } if volume == VOLUMES => {
                Err(Code::NotFound)
            }
            NodeCall::Publish { volume, pod, is_read_only, is_exclusive } => match self.0.get(&pod) {
                Some(there) if *there == (volume, is_read_only) => Ok(()),
                Some(_) => Err(Code::AlreadyExists),
                None if is_exclusive && self.0.values().any(|(other, _)| *other == volume) => {
                    Err(Code::FailedPrecondition)
                }
                None => {
                    self.0.insert(pod, (volume, is_read_only));
                    Ok(())
                }
            },
            NodeCall::Unpublish { volume, pod } => match self.0.get(&pod) {
                // Of a volume that does not exist, the mounter in memory can't tell what its mounts are.
                Some((there, _)) if *there != volume && volume != VOLUMES => Err(Code::FailedPrecondition),
                _ => {
                    self.0.remove(&pod);
                    Ok(())
                }
            },
            NodeCall::Stats { volume, pod } => match self.0.get(&pod) {
                Some((there, _)) if *there == volume => Ok(()),
                _ => Err(Code::NotFound),
            },
        }
    }
}

async fn send_call(plugin: &TestPlugin, node: &mut TestClient, call: NodeCall) -> Result<(), Code> {
    let name = |volume: usize| id(u32::try_from(volume).expect("small"));
    let path = |pod: usize| plugin.pod_path(PODS[pod]);
    match call {
        NodeCall::Publish { volume, pod, is_read_only, is_exclusive } => {
            let mode = if is_exclusive { Mode::SingleNodeSingleWriter } else { Mode::SingleNodeMultiWriter };
            let mut message = publish_message(&name(volume), &path(pod), mode);
            message.readonly = is_read_only;
            node.send_publish(message).await
        }
        NodeCall::Unpublish { volume, pod } => node.unpublish(&name(volume), &path(pod)).await,
        NodeCall::Stats { volume, pod } => node.stats(&name(volume), &path(pod)).await.map(|_| ()),
    }
}

fn check_mounts(plugin: &TestPlugin, mounts: &MemMounter, model: &MountModel) {
    let all = mounts.list_mounts();
    assert_eq!(all.len(), model.0.len());
    for (pod, (volume, is_read_only)) in &model.0 {
        let target = plugin.target_path(PODS[*pod]);
        let volume = plugin.volumes.path(&id(u32::try_from(*volume).expect("small")));
        let of = FileId::from_fd(File::open(volume).expect("open").as_fd()).expect("stat");
        assert_eq!((all[&target].volume, all[&target].flags.read_only), (of, *is_read_only));
        assert_eq!(mounts.stack_depth(&target), 1);
    }
    for pod in PODS {
        let target = plugin.target_path(pod);
        assert_eq!(mounts.has_directory(&target), all.contains_key(&target), "{pod}");
    }
}

#[test]
fn any_order_of_calls_matches_the_model() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let (plugin, mounts) = runtime.block_on(TestPlugin::start_in_memory());
    let node = runtime.block_on(async {
        for volume in 0..VOLUMES {
            plugin.create_volume(u32::try_from(volume).expect("small")).await;
        }
        plugin.node_client().await
    });
    let mut runner =
        TestRunner::new(Config { failure_persistence: None, ..Config::with_cases(crate::cases(250)) });
    let done = runner.run(&proptest::collection::vec(call_strategy(), 1..30), |calls| {
        let mut model = MountModel::default();
        let (mut node, cleanup) =
            (node.clone(), (0..PODS.len()).map(|pod| NodeCall::Unpublish { volume: VOLUMES, pod }));
        for call in calls.into_iter().chain(cleanup) {
            let expected = model.apply_call(call);
            let got = runtime.block_on(send_call(&plugin, &mut node, call));
            prop_assert_eq!(got, expected, "{:?}", call);
            check_mounts(&plugin, &mounts, &model);
        }
        Ok(())
    });
    done.expect("the plugin matches the model");
}
