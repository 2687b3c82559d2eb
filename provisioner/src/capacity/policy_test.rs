//! What may be promised.

use nodekeel_fsquota::Bytes;
use proptest::prelude::*;

use crate::capacity::policy::{CapacityPolicy, CapacityShortage, DiskSpace, StoreCapacity};

const GI: u64 = 1 << 30;

fn measure(policy: CapacityPolicy, other: u64, promised: u64) -> StoreCapacity {
    policy.store_capacity(
        DiskSpace { total: Bytes(8 * GI), free: Bytes(7 * GI) },
        Bytes(other),
        Bytes(promised),
    )
}

#[test]
fn a_hundred_tebibytes_never_fit_on_eight_gibibytes() {
    let capacity = measure(CapacityPolicy::default(), GI, 0);
    let shortage = capacity.check_limit(Bytes(0), Bytes(100 << 40)).expect_err("too large");
    assert_eq!(
        shortage.to_string(),
        "100Ti never fits on this node, which promises 7Gi at most (8Gi less 1Gi for other data); request \
         less, or enlarge the disk"
    );
}

#[test]
fn a_full_store_says_what_is_promised_and_what_is_left() {
    let capacity = measure(CapacityPolicy::default(), 0, 6 * GI + 1);
    let shortage = capacity.check_limit(Bytes(0), Bytes(2 * GI)).expect_err("full");
    assert!(matches!(shortage, CapacityShortage::Full { .. }));
    assert_eq!(
        shortage.to_string(),
        "2Gi can't be promised: of the 8Gi that this node promises to volumes 6.0Gi are promised and 2.0Gi \
         are left; delete volumes, enlarge the disk, or raise capacity.ratio"
    );
    assert_eq!(capacity.check_limit(Bytes(0), Bytes(2 * GI - 1)), Ok(()));
    let fuller = StoreCapacity { free: Bytes(1), ..capacity };
    assert_eq!(fuller.check_limit(Bytes(0), Bytes(2 * GI)), Err(shortage), "no reason to report it again");
}

#[test]
fn the_ratio_applies_to_what_the_reserve_leaves() {
    let policy = CapacityPolicy::try_new(1.5, Bytes(2 * GI)).expect("a ratio");
    assert_eq!(measure(policy, GI, 0).ceiling, Bytes(9 * GI));
    assert_eq!(measure(policy, 4 * GI, 0).ceiling, Bytes(6 * GI), "other data may be more than the reserve");
    assert_eq!(measure(policy, 9 * GI, 0).ceiling, Bytes(0));
    for ratio in [0.0, -1.0, 0.0001, 1001.0, f64::NAN, f64::INFINITY] {
        assert!(CapacityPolicy::try_new(ratio, Bytes(0)).is_err(), "{ratio}");
    }
}

proptest! {
    /// However volumes are created, resized and removed, new promises never exceed the ceiling, and what does
    /// not grow is never refused.
    #[test]
    fn promises_stay_below_the_ceiling(
        (total, reserve, ratio) in (0..u64::MAX, 0..u64::MAX, 0.001..1000.0_f64),
        steps in proptest::collection::vec((0..8_usize, any::<u64>(), 0..64_u32), 0..40),
    ) {
        let policy = CapacityPolicy::try_new(ratio, Bytes(reserve)).expect("in range");
        let mut limits = [0_u64; 8];
        for (volume, size, shift) in steps {
            let promised = Bytes(limits.iter().sum());
            let capacity = policy.store_capacity(DiskSpace { total: Bytes(total), free: Bytes(total) }, Bytes(0), promised);
            let new = size >> shift;
            let checked = capacity.check_limit(Bytes(limits[volume]), Bytes(new));
            if new <= limits[volume] {
                prop_assert_eq!(checked, Ok(()));
            }
            if checked.is_ok() {
                limits[volume] = new;
                let sum: u128 = limits.iter().copied().map(u128::from).sum();
                prop_assert!(sum <= u128::from(capacity.ceiling.0));
            }
        }
    }
}
