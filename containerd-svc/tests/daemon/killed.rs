//! containerd killed while bundles are imported.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_containerd_svc::testing::{Archive, Shape};
use nodekeel_containerd_svc::{ImageStore as _, Preseed};
use nodekeel_supervisor::State;
use testbed::Scratch;

use crate::harness::{Daemon, Release, bundles, namespace, noise_layer, put};

crate::on_both!(killed_while_it_imports_it_has_everything_in_the_end);

const BUNDLES: usize = 4;
const KILLS: u64 = 20;

/// Reference 13, `preseed: daemon dies mid-import`. Each time the daemon comes up, the import goes on where it is; it is killed a little later each time.
async fn killed_while_it_imports_it_has_everything_in_the_end(release: Release) {
    let scratch = Arc::new(Scratch::new().unwrap());
    for number in 0..BUNDLES {
        let layer = noise_layer(8_000_000 + number);
        let name = format!("localhost/killed-{number}:1");
        put(
            &scratch,
            &format!("{number}.tar"),
            &Archive::new(Shape::LayoutLast).image(&[&name], &layer).tar(),
        );
    }
    let directory = bundles(&scratch);
    let daemon = Daemon::start_with(release, scratch, |containerd| {
        containerd.preseed = Some(Preseed::new(directory));
    })
    .await;
    let (mut kills, mut generation) = (0, 1);
    while kills < KILLS {
        daemon.until("root.containerd", generation, State::Ready).await;
        // The time between the kills is what is tested; it may suffice.
        let done = daemon.until("root.containerd.preseed", generation, State::Done);
        drop(tokio::time::timeout(Duration::from_millis(25 * kills), done).await);
        daemon.kill();
        (kills, generation) = (kills + 1, generation + 1);
        daemon.until("root.containerd", generation, State::Ready).await;
        let tree = daemon.supervisor.snapshot();
        let preseed = tree.iter().find(|node| *node.dn == *"root.containerd.preseed").unwrap();
        let own = preseed.exits.iter().filter(|exit| exit.state == State::Dead);
        assert_eq!(own.count(), 0, "what fails is containerd alone: {preseed:#?}");
        for image in daemon.images().await.images(&namespace()).await.unwrap() {
            let checked = daemon.ctr(&["images", "check", &format!("name=={}", image.name)]);
            assert!(checked.contains("complete (2/2)"), "after kill {kills}: {checked}");
        }
    }
    daemon.until("root.containerd.preseed", 1, State::Done).await;
    let names: Vec<_> = daemon.images().await.images(&namespace()).await.unwrap();
    assert_eq!(names.len(), BUNDLES);
    let checked = daemon.ctr(&["images", "check"]);
    assert_eq!(checked.matches("complete (2/2)").count(), BUNDLES, "{checked}");
    println!("killed {kills} times");
    daemon.stop().await;
}
