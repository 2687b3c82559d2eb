//! Consensus by a real etcd: Debian's 3.4, and the newest as a Go tool, the same tests on both.

mod bed;
mod cluster;
mod kills;
mod life;
mod moved;
mod refused;

/// One test on both.
macro_rules! on_both {
    ($($room:ident::$name:ident;)*) => {
        mod debian {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                #[ignore = "needs etcd"]
                async fn $name() {
                    super::$room::$name(super::bed::Version::Debian).await;
                }
            )*
        }

        mod newest {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                #[ignore = "needs go"]
                async fn $name() {
                    super::$room::$name(super::bed::Version::Newest).await;
                }
            )*
        }
    };
}

on_both! {
    life::the_keys_keep_the_contract;
    life::a_member_alone_keeps_the_contract;
    life::a_restart_finds_the_same_authority_and_data;
    life::etcd_killed_comes_back_and_watches_go_on;
    life::a_lease_that_can_not_be_kept_alive_is_told;
    life::an_etcd_that_can_not_work_is_told;
    life::a_member_may_have_an_address_of_ipv6;
    kills::a_member_killed_at_any_time_makes_one_cluster;
    kills::a_joiner_killed_at_any_time_joins;
    kills::a_member_killed_at_any_time_while_it_moves_gets_there;
    cluster::a_learner_joins_and_is_promoted;
    cluster::members_that_start_again_find_each_other;
    cluster::a_third_joins_and_one_that_is_removed_ends;
    moved::a_member_alone_comes_back_at_another_address;
    moved::a_member_comes_back_to_another_at_another_address;
    moved::one_of_three_comes_back_at_another_address;
    refused::a_revocation_comes_to_the_disk_and_refuses_the_client;
    refused::a_member_that_was_revoked_hears_of_it_and_does_not_start_again;
    refused::only_who_has_a_certificate_is_served;
    refused::what_does_not_fit_the_disk_is_refused;
}
