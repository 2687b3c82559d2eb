use proptest::prelude::*;

use super::*;

fn namespace() -> Namespace {
    "k8s.io".parse().expect("a namespace")
}

fn test_bundle(file: &str, content: &str) -> Bundle {
    let fingerprint = BundleFingerprint(Digest::of_content(content.as_bytes()));
    Bundle { namespace: namespace(), directory: BundleDirectory::default(), file: file.into(), fingerprint }
}

fn test_image(name: &str, target: &str, labels: Labels) -> Image {
    let digest = Digest::of_content(target.as_bytes());
    Image { name: name.into(), target: Descriptor { media_type: "x".into(), digest, size: 1 }, labels }
}

fn import_mark(count: usize, unpacked: bool) -> ImportMark {
    ImportMark { count, unpacked, ..ImportMark::default() }
}

/// An image with the marks of these bundles, each with the number of its names and its target.
fn marked_image(name: &str, target: &str, marks: &[(&Bundle, usize, &str)]) -> Image {
    let marks = marks.iter().map(|(bundle, count, target)| {
        bundle.image_labels(name, Digest::of_content(target.as_bytes()), &import_mark(*count, false))
    });
    let pinned = (PINNED_LABEL.0.to_owned(), PINNED_LABEL.1.to_owned());
    test_image(name, target, marks.flatten().chain([pinned]).collect())
}

fn plan(bundles: &[&Bundle], images: &[Image]) -> PreseedPlan {
    plan_with(bundles, images, false)
}

fn plan_with(bundles: &[&Bundle], images: &[Image], unpack: bool) -> PreseedPlan {
    let bundles = bundles.iter().map(|bundle| (*bundle).clone()).collect();
    let wanted = WantedBundles { bundles, listed: [(namespace(), 0)].into(), ..WantedBundles::default() };
    plan_preseed(&wanted, &BTreeMap::from([(namespace(), images.to_vec())]), unpack)
}

fn actions(plan: &PreseedPlan) -> Vec<BundleAction> {
    plan.bundles.iter().map(|(_, action)| action.clone()).collect()
}

fn changes(plan: &PreseedPlan) -> Vec<(&str, ImageUpdateKind)> {
    plan.images.iter().map(|change| (change.image.name.as_str(), change.kind)).collect()
}

const NEW: BundleAction = BundleAction::Import(ImportReason::New);
const CHANGED: BundleAction = BundleAction::Import(ImportReason::Changed);
const INCOMPLETE: BundleAction = BundleAction::Import(ImportReason::Incomplete);

/// Two images of a bundle, as an import lists them.
fn imported_images(bundle: &Bundle, unpacked: bool) -> [Image; 2] {
    ["x", "y"].map(|name| {
        let target = Digest::of_content(name.as_bytes());
        test_image(name, name, bundle.image_labels(name, target, &import_mark(2, unpacked)))
    })
}

#[test]
fn a_new_bundle_is_imported() {
    let (bundle, other) = (test_bundle("a.tar", "1"), test_bundle("b.tar", "1"));
    assert_eq!(actions(&plan(&[&bundle], &[])), [NEW]);
    let listed = marked_image("x", "t", &[(&other, 1, "t")]);
    assert_eq!(actions(&plan(&[&bundle, &other], &[listed]))[0], NEW);
    let wanted = WantedBundles { bundles: vec![bundle.clone()], ..WantedBundles::default() };
    assert_eq!(plan_preseed(&wanted, &BTreeMap::new(), true).bundles, [(bundle, NEW)]);
}

#[test]
fn a_listed_unchanged_bundle_is_only_verified() {
    let bundle = test_bundle("a.tar", "1");
    let images = imported_images(&bundle, false);
    let planned = plan(&[&bundle], &images);
    assert_eq!(actions(&planned), [BundleAction::Verify(images.to_vec())]);
    assert_eq!(planned.images, []);
}

#[test]
fn changed_missing_and_moved_images_are_imported_again() {
    let bundle = test_bundle("a.tar", "1");
    let images = imported_images(&bundle, false);
    let changed = plan(&[&test_bundle("a.tar", "2")], &images);
    assert_eq!(
        (actions(&changed), changed.images),
        (vec![CHANGED], vec![]),
        "the old images stay until then"
    );
    assert_eq!(actions(&plan(&[&bundle], &images[..1])), [INCOMPLETE]);
    let mut moved = images.clone();
    moved[1].target.digest = Digest::of_content(b"elsewhere");
    assert_eq!(actions(&plan(&[&bundle], &moved)), [INCOMPLETE]);
    let mut corrupted = images;
    for image in &mut corrupted {
        image.labels.insert(bundle.label_key(), "corrupt".into());
    }
    assert_eq!(actions(&plan(&[&bundle], &corrupted)), [CHANGED]);
}

#[test]
fn a_mark_keeps_how_many_images_are_left_out_and_which_of_them_the_policy_has_refused() {
    let (bundle, target) = (test_bundle("a.tar", "1"), Digest::of_content(b"x"));
    let refused = |count: usize| {
        let image = |number| (format!("[fd00::1]:5000/app:{number}").parse().expect("a name"), target);
        (0..count).map(image).collect::<Vec<_>>()
    };
    for (left_out, named, is_known) in
        [(0, 0, true), (3, 0, false), (3, 2, false), (3, 3, true), (99, 99, false)]
    {
        for unpacked in [false, true] {
            let import = ImportMark { count: 1, left_out, refused: refused(named), unpacked };
            let labels = bundle.image_labels("x", target, &import);
            assert!(labels[&bundle.label_key()].len() < 3000, "containerd has a limit");
            let mark: BundleMark = labels[&bundle.label_key()].parse().expect("a mark");
            assert_eq!(
                (mark.left_out, mark.unpacked, mark.image.as_deref()),
                (left_out, unpacked, Some("x"))
            );
            let known = bundle.find_refused(&[test_image("x", "x", labels)]);
            assert_eq!(known, is_known.then(|| refused(named)));
        }
    }
}

#[test]
fn a_bundle_is_imported_again_when_unpacking_is_turned_on() {
    let bundle = test_bundle("a.tar", "1");
    let (packed, unpacked) = (imported_images(&bundle, false), imported_images(&bundle, true));
    let planned = plan_with(&[&bundle], &packed, true);
    assert_eq!(actions(&planned), [BundleAction::Import(ImportReason::NotUnpacked)]);
    for unpack in [false, true] {
        let planned = plan_with(&[&bundle], &unpacked, unpack);
        assert_eq!(actions(&planned), [BundleAction::Verify(unpacked.to_vec())]);
    }
}

#[test]
fn a_name_that_a_changed_bundle_no_longer_brings_is_unpinned_and_does_not_change_the_bundle() {
    let (old, new) = (test_bundle("a.tar", "1"), test_bundle("a.tar", "2"));
    let images =
        [marked_image("app:v1", "1", &[(&old, 1, "1")]), marked_image("app:v2", "2", &[(&new, 1, "2")])];
    let planned = plan(&[&new], &images);
    assert_eq!(actions(&planned), [BundleAction::Verify(vec![images[1].clone()])]);
    assert_eq!(changes(&planned), [("app:v1", ImageUpdateKind::Unpin)]);
    let after = &planned.images[0].image;
    assert_eq!(after.target, images[0].target);
    assert!(after.labels.values().all(String::is_empty) && after.labels.len() == 2, "{after:?}");
}

#[test]
fn images_of_a_deleted_bundle_are_unpinned_and_other_images_are_left_alone() {
    let gone = test_bundle("gone.tar", "1");
    let pulled =
        test_image("pulled", "p", Labels::from([("io.cri-containerd.pinned".into(), "pinned".into())]));
    let planned = plan(&[], &[marked_image("x", "1", &[(&gone, 1, "1")]), pulled]);
    assert_eq!(changes(&planned), [("x", ImageUpdateKind::Unpin)]);
}

/// As `ctr images tag` makes it.
fn copied_image(image: &Image, name: &str) -> Image {
    Image { name: name.into(), ..image.clone() }
}

#[test]
fn an_image_of_which_only_a_copy_is_left_is_imported_again() {
    let bundle = test_bundle("a.tar", "1");
    let image = marked_image("x", "1", &[(&bundle, 1, "1")]);
    let copy = copied_image(&image, "mine");
    let planned = plan(&[&bundle], std::slice::from_ref(&copy));
    assert_eq!(actions(&planned), [INCOMPLETE]);
    // A copy counts for nothing, and loses what it copied.
    let planned = plan(&[&bundle], &[image.clone(), copy]);
    assert_eq!(actions(&planned), [BundleAction::Verify(vec![image])]);
    assert_eq!(changes(&planned), [("mine", ImageUpdateKind::Unpin)]);
}

#[test]
fn marks_of_a_release_without_names_count_until_an_import_gives_them_names() {
    let bundle = test_bundle("a.tar", "1");
    let named = imported_images(&bundle, false);
    let mut unnamed = named.clone();
    for image in &mut unnamed {
        for text in image.labels.values_mut() {
            *text = text.split(" image=").next().unwrap_or_default().to_owned();
        }
    }
    assert_eq!(actions(&plan(&[&bundle], &unnamed)), [BundleAction::Verify(unnamed.to_vec())]);
    let copy = copied_image(&unnamed[0], "mine");
    let images = [unnamed[0].clone(), unnamed[1].clone(), copy.clone()];
    assert_eq!(actions(&plan(&[&bundle], &images)), [INCOMPLETE]);
    let planned = plan(&[&bundle], &[named[0].clone(), named[1].clone(), copy]);
    assert_eq!(actions(&planned), [BundleAction::Verify(named.to_vec())]);
    assert_eq!(changes(&planned), [("mine", ImageUpdateKind::Unpin)]);
}

#[test]
fn an_unreadable_bundle_keeps_what_it_brought() {
    let bundle = test_bundle("a.tar", "1");
    let images = [marked_image("x", "1", &[(&bundle, 1, "1")])];
    for file in [Some("a.tar".to_owned()), None] {
        let wanted =
            WantedBundles { unreadable: [(namespace(), 0, file)].into(), ..WantedBundles::default() };
        let listed = BTreeMap::from([(namespace(), images.to_vec())]);
        assert_eq!(plan_preseed(&wanted, &listed, false), PreseedPlan::default());
    }
}

#[test]
fn the_first_of_two_bundles_owns_a_name_and_both_are_unchanged() {
    let (a, b) = (test_bundle("a.tar", "1"), test_bundle("b.tar", "2"));
    let images = [marked_image("x", "of a", &[(&a, 1, "of a"), (&b, 1, "of b")])];
    let planned = plan(&[&a, &b], &images);
    assert_eq!(actions(&planned), [BundleAction::Verify(images.to_vec()), BundleAction::Verify(vec![])]);
    assert_eq!(planned.images, []);
}

#[test]
fn the_name_of_a_deleted_bundle_goes_to_the_one_that_remains() {
    let (a, b) = (test_bundle("a.tar", "1"), test_bundle("b.tar", "2"));
    let shared = marked_image("x", "of a", &[(&a, 1, "of a"), (&b, 1, "of b")]);
    let planned = plan(&[&b], std::slice::from_ref(&shared));
    assert_eq!(actions(&planned), [INCOMPLETE], "the store does not have its image");
    assert_eq!(changes(&planned), [("x", ImageUpdateKind::Unmark)]);

    let [mut shared, mut other] = [shared, marked_image("y", "of b", &[(&b, 2, "of b")])];
    shared.labels.extend(b.image_labels("x", Digest::of_content(b"of b"), &import_mark(2, false)));
    other.target.media_type = "of y".into();
    let planned = plan(&[&b], &[shared, other.clone()]);
    assert!(
        matches!(&actions(&planned)[..], [BundleAction::Verify(owned)] if owned.len() == 2),
        "{planned:?}"
    );
    assert_eq!(changes(&planned), [("x", ImageUpdateKind::Repoint)]);
    let after = &planned.images[0].image;
    assert_eq!(after.target, other.target);
    assert_eq!(after.labels[&a.label_key()], "");
    assert_eq!(after.labels[PINNED_LABEL.0], PINNED_LABEL.1);
}

#[test]
fn a_namespace_whose_directory_was_not_listed_keeps_its_images_as_they_are() {
    let images = [marked_image("x", "1", &[(&test_bundle("a.tar", "1"), 1, "1")])];
    let listed = BTreeMap::from([(namespace(), images.to_vec())]);
    let mut wanted = WantedBundles::default();
    assert_eq!(plan_preseed(&wanted, &listed, false), PreseedPlan::default(), "absent is not deleted");
    wanted.listed.insert((namespace(), 0));
    assert_eq!(changes(&plan_preseed(&wanted, &listed, false)), [("x", ImageUpdateKind::Unpin)]);
}

#[test]
fn a_directory_that_is_absent_keeps_its_names_and_the_first_directory_comes_first() {
    let of = |rank, content| Bundle {
        directory: BundleDirectory { rank, ..BundleDirectory::default() },
        ..test_bundle("z.tar", content)
    };
    let (first, second) = (of(0, "1"), of(1, "2"));
    let later = Bundle { file: "a.tar".into(), ..of(2, "3") };
    let marks = [(&first, 1, "of 1"), (&second, 1, "of 2"), (&later, 1, "of 3")];
    let images = [marked_image("x", "of 1", &marks)];
    let plan = |bundles: &[&Bundle], listed: &[usize]| {
        let wanted = WantedBundles {
            bundles: bundles.iter().map(|bundle| (*bundle).clone()).collect(),
            listed: listed.iter().map(|rank| (namespace(), *rank)).collect(),
            directory_count: 3,
            ..WantedBundles::default()
        };
        plan_preseed(&wanted, &BTreeMap::from([(namespace(), images.to_vec())]), false)
    };
    let verified = |owned: &[Image]| BundleAction::Verify(owned.to_vec());
    let planned = plan(&[&first, &second, &later], &[0, 1, 2]);
    assert_eq!(actions(&planned), [verified(&images), verified(&[]), verified(&[])]);
    // Of those that are absent, nothing is known; one that is listed has no such file any more.
    for (bundles, listed) in [(vec![&second, &later], &[1, 2][..]), (vec![&later], &[2]), (vec![], &[])] {
        let planned = plan(&bundles, listed);
        assert_eq!(actions(&planned), vec![verified(&[]); bundles.len()]);
        assert_eq!(planned.images, []);
    }
    let planned = plan(&[&later], &[0, 1, 2]);
    assert_eq!(
        (actions(&planned), changes(&planned)),
        (vec![INCOMPLETE], vec![("x", ImageUpdateKind::Unmark)])
    );
    assert_eq!(changes(&plan(&[], &[0, 1, 2])), [("x", ImageUpdateKind::Unpin)]);
}

#[test]
fn an_earlier_bundle_that_has_to_be_imported_keeps_its_names_until_then() {
    let (old, new, b) = (test_bundle("a.tar", "1"), test_bundle("a.tar", "2"), test_bundle("b.tar", "2"));
    let images = [marked_image("x", "of a", &[(&old, 1, "of a"), (&b, 1, "of b")])];
    let planned = plan(&[&new, &b], &images);
    assert_eq!(actions(&planned), [CHANGED, BundleAction::Verify(vec![])]);
    assert_eq!(planned.images, []);
    let wanted = WantedBundles { bundles: vec![new, b.clone()], ..WantedBundles::default() };
    assert_eq!(find_name_owner(&wanted, &b, &images, "x"), Some((&images[0], Some(&wanted.bundles[0]))));
    assert_eq!(find_name_owner(&wanted, &wanted.bundles[0], &images, "x"), None);
}

/// A bundle of the model: the content of its file, and the target of each of its names.
type ModelBundle = (u8, BTreeMap<u8, u8>);

/// What an import of the bundle lists, as `Preseed` does it.
fn import_in_model(
    wanted: &WantedBundles,
    bundle: &Bundle,
    names: &BTreeMap<u8, u8>,
    images: &mut Vec<Image>,
) {
    for (name, target) in names {
        let (name, target) = (format!("n{name}"), format!("t{target}"));
        let owner = find_name_owner(wanted, bundle, images, &name).map(|(image, _)| image.target.clone());
        let mut image = marked_image(&name, &target, &[(bundle, names.len(), &target)]);
        image.target = owner.unwrap_or(image.target);
        match images.iter_mut().find(|listed| listed.name == name) {
            Some(listed) => {
                listed.target = image.target;
                listed.labels.extend(image.labels);
            }
            None => images.push(image),
        }
    }
}

/// Passes until the plan is only to verify; returns how many imports that took.
fn reconcile_in_model(bundles: &BTreeMap<u8, ModelBundle>, images: &mut Vec<Image>) -> usize {
    let of_model = |(file, (content, _)): (&u8, &ModelBundle)| {
        test_bundle(&format!("{file}.tar"), &format!("{file} {content}"))
    };
    let bundle_list = bundles.iter().map(of_model).collect();
    let wanted =
        WantedBundles { bundles: bundle_list, listed: [(namespace(), 0)].into(), ..WantedBundles::default() };
    let mut imports = 0;
    loop {
        let listed = BTreeMap::from([(namespace(), images.clone())]);
        let planned = plan_preseed(&wanted, &listed, false);
        let before = imports;
        for ((bundle, action), (_, names)) in planned.bundles.iter().zip(bundles.values()) {
            if matches!(action, BundleAction::Import(_)) {
                import_in_model(&wanted, bundle, names, images);
                imports += 1;
            }
        }
        assert!(imports <= 3 * bundles.len(), "it converges");
        if imports == before {
            for change in planned.images {
                let image = images.iter_mut().find(|image| image.name == change.image.name).expect("listed");
                *image = change.image;
                image.labels.retain(|_, value| !value.is_empty());
            }
            return imports;
        }
    }
}

/// Planning that is quadratic takes minutes here.
#[test]
fn ten_thousand_bundles_are_planned() {
    let bundles: Vec<_> = (0..10_000).map(|number| test_bundle(&format!("{number}.tar"), "1")).collect();
    let name = |number: usize| format!("localhost/{number}:1");
    let image = |(number, bundle): (usize, &Bundle)| {
        marked_image(&name(number), &name(number), &[(bundle, 1, &name(number))])
    };
    let images: Vec<_> = bundles.iter().enumerate().map(image).collect();
    let start = std::time::Instant::now();
    let planned = plan(&bundles.iter().collect::<Vec<_>>(), &images);
    println!("planned in {:?}", start.elapsed());
    assert_eq!(planned.images, []);
    for ((_, action), image) in planned.bundles.iter().zip(&images) {
        assert_eq!(*action, BundleAction::Verify(vec![image.clone()]));
    }
}

/// A node that stops waits for no plan.
#[test]
fn a_canceled_plan_ends_at_the_next_image_or_bundle() {
    let bundle = test_bundle("a.tar", "1");
    let images = vec![marked_image("localhost/a:1", "a", &[(&bundle, 1, "a")])];
    let wanted = WantedBundles { bundles: vec![bundle.clone()], ..WantedBundles::default() };
    for (listed, questions) in [(BTreeMap::new(), 1), (BTreeMap::from([(bundle.namespace, images)]), 2)] {
        for before in 0..=questions {
            let asked = std::cell::Cell::new(0);
            let is_canceled = || asked.replace(asked.get() + 1) == before;
            assert_eq!(plan_until(&wanted, &listed, false, is_canceled).is_none(), before < questions);
        }
    }
}

proptest! {
    /// After any changes of the directory: each name has the target of the first bundle that brings it, the
    /// others are unpinned, nothing is removed, and a second pass does nothing.
    #[test]
    fn every_name_belongs_to_the_first_bundle_that_brings_it(
        directories in prop::collection::vec(
            prop::collection::btree_map(0_u8..4, (0_u8..3, prop::collection::btree_map(0_u8..4, 0_u8..4, 1..4)), 0..4),
            1..5,
        )
    ) {
        let mut images = Vec::new();
        let mut known: BTreeMap<(u8, u8), BTreeMap<u8, u8>> = BTreeMap::new();
        for mut bundles in directories {
            // The content of a file decides its names.
            for (file, (content, names)) in &mut bundles {
                names.clone_from(known.entry((*file, *content)).or_insert_with(|| names.clone()));
            }
            let before: BTreeSet<String> = images.iter().map(|image: &Image| image.name.clone()).collect();
            reconcile_in_model(&bundles, &mut images);
            let mut expected: BTreeMap<String, String> = BTreeMap::new();
            for (_, names) in bundles.values() {
                for (name, target) in names {
                    expected.entry(format!("n{name}")).or_insert(format!("t{target}"));
                }
            }
            for image in &images {
                let target = expected.remove(&image.name);
                let is_marked = image.labels.keys().any(|key| key.starts_with(BUNDLE_LABEL_PREFIX));
                prop_assert_eq!(image.labels.contains_key(PINNED_LABEL.0), target.is_some(), "{:?}", image);
                prop_assert_eq!(is_marked, target.is_some(), "{:?}", image);
                if let Some(target) = target {
                    prop_assert_eq!(image.target.digest, Digest::of_content(target.as_bytes()), "{:?}", image);
                }
            }
            prop_assert!(expected.is_empty(), "{expected:?} is not listed");
            prop_assert!(before.iter().all(|name| images.iter().any(|image| image.name == *name)));
            let settled = images.clone();
            prop_assert_eq!(reconcile_in_model(&bundles, &mut images), 0, "a second pass imports nothing");
            prop_assert_eq!(&images, &settled);
        }
    }

    #[test]
    fn no_mark_makes_planning_panic(text in "[0-9a-f:sh ]{0,200}") {
        let bundle = test_bundle("a.tar", "1");
        let labels = Labels::from([(bundle.label_key(), text)]);
        let action = actions(&plan(&[&bundle], &[test_image("x", "x", labels)])).remove(0);
        prop_assert!(!matches!(action, BundleAction::Verify(_)));
    }

    #[test]
    fn a_mark_survives_formatting_and_parsing(
        (count, left_out, unpacked, [a, b]) in any::<(usize, usize, bool, [[u8; 8]; 2])>(),
        image in prop::option::of("[a-z/.:]{1,20}"),
        names in prop::collection::vec("[a-z]{1,8}:[a-z]{1,8}", 0..3),
    ) {
        let (fingerprint, target) = (BundleFingerprint(Digest::of_content(&a)), Digest::of_content(&b));
        let refused = names.iter().map(|name| (name.parse().expect("a name"), target)).collect();
        let mark = BundleMark { fingerprint, count, target, image, left_out, refused, unpacked };
        prop_assert_eq!(mark.to_string().parse(), Ok(mark));
    }
}
