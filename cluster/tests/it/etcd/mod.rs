//! Consensus by a real etcd: Debian's 3.4, and the newest as a Go tool, the same tests on both.

mod address_change;
mod cluster;
mod etcd_fixture;
mod kills;
mod lifecycle;
mod rejections;

pub(crate) use etcd_fixture::{EtcdVersion, etcd_processes};

/// One test on both.
macro_rules! on_both {
    ($($room:ident::$name:ident;)*) => {
        mod debian {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                #[ignore = "needs etcd"]
                async fn $name() {
                    super::$room::$name(super::etcd_fixture::EtcdVersion::Debian).await;
                }
            )*
        }

        mod newest {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                #[ignore = "needs go"]
                async fn $name() {
                    super::$room::$name(super::etcd_fixture::EtcdVersion::Newest).await;
                }
            )*
        }
    };
}

on_both! {
    lifecycle::etcd_keys_meet_the_store_contract;
    lifecycle::unlock_keys_are_kept_beside_the_record_of_their_node;
    lifecycle::a_single_member_meets_the_consensus_contract;
    lifecycle::a_restarted_member_has_the_same_ca_and_data;
    lifecycle::a_killed_etcd_restarts_and_its_watches_resume;
    lifecycle::a_watch_of_compacted_changes_fails_and_one_of_later_changes_does_not;
    lifecycle::an_etcd_that_cannot_start_fails_the_member_with_its_exit_code;
    lifecycle::a_member_serves_at_an_ipv6_address;
    kills::a_member_killed_at_any_time_makes_one_cluster;
    kills::a_joiner_killed_at_any_time_joins;
    kills::a_member_killed_at_any_time_during_an_address_change_completes_it;
    cluster::a_learner_joins_and_is_promoted;
    cluster::restarted_members_find_each_other;
    cluster::a_third_member_joins_and_a_removed_member_exits;
    address_change::a_single_member_restarts_at_another_address;
    address_change::each_of_two_members_restarts_at_another_address;
    address_change::one_of_three_members_restarts_at_another_address;
    rejections::a_revoked_client_is_rejected_once_the_crl_is_on_the_disk;
    rejections::a_revoked_member_does_not_start_again;
    rejections::only_client_certificates_of_the_ca_are_served;
    rejections::a_start_that_does_not_match_the_disk_is_rejected;
}
