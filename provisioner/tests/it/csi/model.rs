//! Any order of calls, against a model of what has to come of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd as _;

use nodekeel_provisioner::csi::FileId;
use nodekeel_provisioner::csi::proto::csi::volume_capability::access_mode::Mode;
use nodekeel_provisioner::csi::testing::MemMounts;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tonic::Code;

use super::harness::{Client, Running, id, request};

const PODS: [&str; 3] = ["a", "b", "c"];

/// How many volumes exist; one more doesn't.
const VOLUMES: usize = 2;

#[derive(Debug, Clone, Copy)]
enum Call {
    Publish { volume: usize, pod: usize, is_read_only: bool, is_exclusive: bool },
    Unpublish { volume: usize, pod: usize },
    Stats { volume: usize, pod: usize },
}

fn call() -> impl Strategy<Value = Call> {
    let (volume, pod) = (0..=VOLUMES, 0..PODS.len());
    prop_oneof![
        3 => (volume.clone(), pod.clone(), any::<bool>(), any::<bool>()).prop_map(
            |(volume, pod, is_read_only, is_exclusive)| Call::Publish { volume, pod, is_read_only, is_exclusive }
        ),
        2 => (volume.clone(), pod.clone()).prop_map(|(volume, pod)| Call::Unpublish { volume, pod }),
        1 => (volume, pod).prop_map(|(volume, pod)| Call::Stats { volume, pod }),
    ]
}

/// What is where: for each pod the volume, and whether it may not write.
#[derive(Debug, Default)]
struct Model(BTreeMap<usize, (usize, bool)>);

impl Model {
    fn expect(&mut self, call: Call) -> Result<(), Code> {
        match call {
            Call::Publish { volume, .. } | Call::Stats { volume, .. } if volume == VOLUMES => {
                Err(Code::NotFound)
            }
            Call::Publish { volume, pod, is_read_only, is_exclusive } => match self.0.get(&pod) {
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
            Call::Unpublish { pod, .. } => {
                self.0.remove(&pod);
                Ok(())
            }
            Call::Stats { volume, pod } => match self.0.get(&pod) {
                Some((there, _)) if *there == volume => Ok(()),
                _ => Err(Code::NotFound),
            },
        }
    }
}

async fn make(running: &Running, node: &mut Client, call: Call) -> Result<(), Code> {
    let name = |volume: usize| id(u32::try_from(volume).expect("small"));
    let path = |pod: usize| running.path(PODS[pod]);
    match call {
        Call::Publish { volume, pod, is_read_only, is_exclusive } => {
            let mode = if is_exclusive { Mode::SingleNodeSingleWriter } else { Mode::SingleNodeMultiWriter };
            let mut asked = request(&name(volume), &path(pod), mode);
            asked.readonly = is_read_only;
            node.send(asked).await
        }
        Call::Unpublish { volume, pod } => node.unpublish(&name(volume), &path(pod)).await,
        Call::Stats { volume, pod } => node.stats(&name(volume), &path(pod)).await.map(|_| ()),
    }
}

fn check(running: &Running, mounts: &MemMounts, model: &Model) {
    let all = mounts.all();
    assert_eq!(all.len(), model.0.len());
    for (pod, (volume, is_read_only)) in &model.0 {
        let target = running.target(PODS[*pod]);
        let volume = running.volumes.path(&id(u32::try_from(*volume).expect("small")));
        let of = FileId::of(File::open(volume).expect("open").as_fd()).expect("stat");
        assert_eq!((all[&target].of, all[&target].flags.read_only), (of, *is_read_only));
        assert_eq!(mounts.depth(&target), 1);
    }
    for pod in PODS {
        let target = running.target(pod);
        assert_eq!(mounts.has_directory(&target), all.contains_key(&target), "{pod}");
    }
}

#[test]
fn any_order_of_calls_ends_where_the_model_does() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let (running, mounts) = runtime.block_on(Running::with_memory());
    let node = runtime.block_on(async {
        for volume in 0..VOLUMES {
            running.volume(u32::try_from(volume).expect("small")).await;
        }
        running.node().await
    });
    let mut runner =
        TestRunner::new(Config { failure_persistence: None, ..Config::with_cases(crate::cases(250)) });
    let done = runner.run(&proptest::collection::vec(call(), 1..30), |calls| {
        let mut model = Model::default();
        let (mut node, cleanup) =
            (node.clone(), (0..PODS.len()).map(|pod| Call::Unpublish { volume: 0, pod }));
        for call in calls.into_iter().chain(cleanup) {
            let expected = model.expect(call);
            let got = runtime.block_on(make(&running, &mut node, call));
            prop_assert_eq!(got, expected, "{:?}", call);
            check(&running, &mounts, &model);
        }
        Ok(())
    });
    done.expect("the plugin does as the model");
}
