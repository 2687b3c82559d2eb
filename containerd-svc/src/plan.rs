//! What is to be imported, as a function of what lies in the directory and what is listed.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::image::{Image, Labels};
use crate::{Digest, Namespace};

/// Begins the key of the label by which a listed image names a bundle that it is in.
pub const MARK: &str = "nodekeel.preseed/";

/// What a file is known by, without reading all of it: its size, its time of change, and its first and last 64 KiB.
///
/// An archive that is made anew has another index or checksum there, so this is as good as its digest for files that
/// nobody forges; and the images themselves are known by their digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub Digest);

/// A file with images, by where it lies in the directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bundle {
    /// Where its images belong: the name of its directory.
    pub namespace: Namespace,
    /// Its name there, as `pause.tar`.
    pub file: String,
    /// What it is known by.
    pub fingerprint: Fingerprint,
}

/// What is to be done with a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// All of its images are listed: look whether their content is there, and if so leave it alone.
    Verify(Vec<Image>),
    /// Read it.
    Import(Reason),
}

/// Why a bundle has to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// None of its images is listed.
    New,
    /// It is another file than that which was imported under its name.
    Changed,
    /// An image of it is gone, or leads elsewhere now.
    Incomplete,
    /// Its layers are to be unpacked, and were not when it was imported.
    Packed,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::New => "it is new",
            Self::Changed => "it has changed",
            Self::Incomplete => "an image of it is gone",
            Self::Packed => "it is not unpacked",
        })
    }
}

/// What a label says: which file, how many images it names, where this one led, and whether its layers were unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) count: usize,
    pub(crate) target: Digest,
    pub(crate) unpacked: bool,
}

/// What a label ends with where layers were unpacked.
const UNPACKED: &str = "unpacked";

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.fingerprint.0.hex(), self.count, self.target)?;
        if self.unpacked { write!(f, " {UNPACKED}") } else { Ok(()) }
    }
}

impl FromStr for Mark {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split(' ');
        let mut next = || parts.next().ok_or(());
        let fingerprint = Fingerprint(Digest::from_hex(next()?).ok_or(())?);
        let count = next()?.parse().map_err(drop)?;
        let target = next()?.parse().map_err(drop)?;
        let unpacked = match parts.next() {
            None => false,
            Some(UNPACKED) => true,
            Some(_) => return Err(()),
        };
        if parts.next().is_some() { Err(()) } else { Ok(Self { fingerprint, count, target, unpacked }) }
    }
}

impl Bundle {
    /// The key of its label.
    pub(crate) fn label(&self) -> String {
        format!("{MARK}{}", self.file)
    }

    /// The label of an image of it.
    pub(crate) fn mark(&self, count: usize, target: Digest, unpacked: bool) -> Labels {
        let mark = Mark { fingerprint: self.fingerprint, count, target, unpacked };
        Labels::from([(self.label(), mark.to_string())])
    }
}

/// What is to be done with each bundle, in their order. `listed` holds the images of each namespace; `unpack` tells
/// whether their layers are to be unpacked. What is unpacked already stays so.
pub fn plan(
    bundles: Vec<Bundle>,
    listed: &BTreeMap<Namespace, Vec<Image>>,
    unpack: bool,
) -> Vec<(Bundle, Action)> {
    let planned = bundles.into_iter().map(|bundle| {
        let images = listed.get(&bundle.namespace).map_or(&[][..], Vec::as_slice);
        let action = action(&bundle, images, unpack);
        (bundle, action)
    });
    planned.collect()
}

fn action(bundle: &Bundle, images: &[Image], unpack: bool) -> Action {
    let key = bundle.label();
    let own: Vec<(&Image, &String)> =
        images.iter().filter_map(|image| Some((image, image.labels.get(&key)?))).collect();
    if own.is_empty() {
        return Action::Import(Reason::New);
    }
    let Ok(marks) = own.iter().map(|(_, label)| label.parse::<Mark>()).collect::<Result<Vec<_>, _>>() else {
        return Action::Import(Reason::Changed);
    };
    if marks.iter().any(|mark| mark.fingerprint != bundle.fingerprint) {
        return Action::Import(Reason::Changed);
    }
    let all_there = marks.iter().all(|mark| mark.count == own.len());
    let unmoved = marks.iter().zip(&own).all(|(mark, (image, _))| mark.target == image.target.digest);
    if !(all_there && unmoved) {
        return Action::Import(Reason::Incomplete);
    }
    if unpack && marks.iter().any(|mark| !mark.unpacked) {
        return Action::Import(Reason::Packed);
    }
    Action::Verify(own.into_iter().map(|(image, _)| image.clone()).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::image::Descriptor;

    fn bundle(file: &str, content: &str) -> Bundle {
        let namespace = "k8s.io".parse().expect("a namespace");
        Bundle { namespace, file: file.into(), fingerprint: Fingerprint(Digest::of(content.as_bytes())) }
    }

    fn image(name: &str, target: &str, labels: Labels) -> Image {
        let digest = Digest::of(target.as_bytes());
        Image { name: name.into(), target: Descriptor { media_type: "x".into(), digest, size: 1 }, labels }
    }

    fn of(bundle: &Bundle, images: &[Image]) -> Action {
        wanted(bundle, images, false)
    }

    fn wanted(bundle: &Bundle, images: &[Image], unpack: bool) -> Action {
        let listed = BTreeMap::from([(bundle.namespace.clone(), images.to_vec())]);
        plan(vec![bundle.clone()], &listed, unpack).remove(0).1
    }

    /// Two images of a bundle, as an import lists them.
    fn imported(own: &Bundle, unpacked: bool) -> [Image; 2] {
        ["x", "y"].map(|name| image(name, name, own.mark(2, Digest::of(name.as_bytes()), unpacked)))
    }

    #[test]
    fn what_was_never_imported_is_read() {
        let own = bundle("a.tar", "1");
        assert_eq!(of(&own, &[]), Action::Import(Reason::New));
        let others = image("x", "t", bundle("b.tar", "1").mark(1, Digest::of(b"t"), false));
        assert_eq!(of(&own, &[others]), Action::Import(Reason::New));
        assert_eq!(plan(vec![own.clone()], &BTreeMap::new(), true), [(own, Action::Import(Reason::New))]);
    }

    #[test]
    fn what_is_listed_as_it_was_imported_is_not_read() {
        let own = bundle("a.tar", "1");
        let images = imported(&own, false);
        assert_eq!(of(&own, &images), Action::Verify(images.to_vec()));
    }

    #[test]
    fn a_change_a_loss_and_a_move_are_noticed() {
        let own = bundle("a.tar", "1");
        let images = imported(&own, false);
        assert_eq!(of(&bundle("a.tar", "2"), &images), Action::Import(Reason::Changed));
        assert_eq!(of(&own, &images[..1]), Action::Import(Reason::Incomplete));
        let mut moved = images.clone();
        moved[1].target.digest = Digest::of(b"elsewhere");
        assert_eq!(of(&own, &moved), Action::Import(Reason::Incomplete));
        let mut scribbled = images;
        scribbled[0].labels.insert(own.label(), "scribble".into());
        assert_eq!(of(&own, &scribbled), Action::Import(Reason::Changed));
    }

    #[test]
    fn what_was_not_unpacked_is_read_again_once_it_is_to_be() {
        let own = bundle("a.tar", "1");
        let (packed, unpacked) = (imported(&own, false), imported(&own, true));
        assert_eq!(wanted(&own, &packed, true), Action::Import(Reason::Packed));
        for unpack in [false, true] {
            assert_eq!(wanted(&own, &unpacked, unpack), Action::Verify(unpacked.to_vec()));
        }
    }

    proptest! {
        #[test]
        fn no_label_makes_it_panic(text in "[0-9a-f:sh ]{0,200}") {
            let own = bundle("a.tar", "1");
            let labels = Labels::from([(own.label(), text)]);
            let action = of(&own, &[image("x", "x", labels)]);
            prop_assert!(!matches!(action, Action::Verify(_)));
        }

        #[test]
        fn a_mark_is_read_as_it_is_written(count: usize, a: [u8; 8], b: [u8; 8], unpacked: bool) {
            let (fingerprint, target) = (Fingerprint(Digest::of(&a)), Digest::of(&b));
            let mark = Mark { fingerprint, count, target, unpacked };
            prop_assert_eq!(mark.to_string().parse(), Ok(mark));
        }
    }
}
