//! Distributions that a join allows on a set of devices, and the refusal of one that was asked for.

use super::cost::Question;
use super::{BoundJoin, Composition, Distribution, JoinKind, Side, Target};
use crate::columns::KeyLayout;
use crate::device::ROWS_MAX;
use crate::{Error, Result};

/// Reason why some GPUs run no join together.
const NO_GANG: &str = "GPUs run a join together only if each has a process of its own (--device-processes) and memory that \
     the others can write; slices of a GPU (MIG) have none";

/// Reason why host devices and GPUs exchange no rows.
const NO_WINDOWS_OF_BOTH: &str = "GPUs and the CPU exchange no rows";

/// True if ranks can divide a join with the given build side in this way, and the caller asks for
/// no other.
pub(super) fn is_possible(question: &Question<'_>, build_side: Side, distribution: Distribution) -> Result<bool> {
    let Question { join, overrides, target, .. } = *question;
    let is_wanted = overrides.distribution.is_none_or(|wanted| wanted == distribution);
    Ok(match distribution {
        Distribution::Alone => true,
        Distribution::Broadcast => is_wanted && join.how.build_rows_kept(build_side).is_none(),
        Distribution::Hash => is_wanted && target.capabilities.exchanges && !is_hashed(join, build_side)?,
    })
}

/// True if the keys are too wide to be packed.
fn is_hashed(join: &BoundJoin, build_side: Side) -> Result<bool> {
    join.key_facts(build_side).map(|facts| KeyLayout::new(facts, 0).is_hashed())
}

/// Returns the reason why several devices do not exchange rows, if they cannot.
pub(super) fn undivided(question: &Question<'_>, chosen: &Composition) -> Result<Option<String>> {
    let Question { join, target, .. } = *question;
    if target.ranks == 1 || chosen.exchanges_rows() {
        return Ok(None);
    }
    let instead = match chosen.distribution {
        Distribution::Broadcast => "each device has the whole build side",
        _ => "one device runs it",
    };
    let why = if !target.capabilities.forms_gangs {
        NO_GANG
    } else if target.helping_hosts > 0 {
        NO_WINDOWS_OF_BOTH
    } else if !target.capabilities.exchanges {
        "these devices share no memory to exchange rows in"
    } else if is_hashed(join, chosen.build_side)? {
        "rows are not exchanged by keys that are hashed"
    } else {
        return Ok(None);
    };
    Ok(Some(format!("{instead}, because {why}")))
}

/// Returns the refusal of a distribution by which these devices cannot run the join.
///
/// # Errors
/// The errors of [`BoundJoin::key_facts`].
pub(super) fn refusal(join: &BoundJoin, distribution: Distribution, target: &Target) -> Result<Error> {
    let name = distribution.name();
    let reason = match distribution {
        _ if target.ranks == 1 => return Ok(needs_several_devices(distribution)),
        _ if !target.capabilities.forms_gangs => format!("{NO_GANG}; ask for one device"),
        Distribution::Broadcast if join.how == JoinKind::Full => "a full join keeps the rows of both sides that match \
             nothing, and with all rows of a side no device knows what the others have matched; ask for \"hash\" or \"auto\""
            .into(),
        Distribution::Alone | Distribution::Broadcast => {
            format!("each side that could be indexed has more than {ROWS_MAX} rows, the most that a device can index; ask for \"hash\" or \"auto\"")
        }
        Distribution::Hash if target.helping_hosts > 0 => {
            format!("{NO_WINDOWS_OF_BOTH}; ask for \"broadcast\" or \"auto\"")
        }
        Distribution::Hash if !target.capabilities.exchanges => format!(
            "{} shares no memory with other devices, because a topology file emulates its links; ask for \"broadcast\" or \"auto\"",
            target.name
        ),
        Distribution::Hash if is_hashed(join, Side::Left)? => "only rows with keys of at most 16 bytes cross to the \
             device of their key, and these keys are wider; ask for \"broadcast\" or \"auto\""
            .into(),
        Distribution::Hash => {
            format!("each device would get more than {ROWS_MAX} rows of either side, the most that it can index; ask for more devices")
        }
    };
    Ok(Error::Invalid(format!("this join cannot be divided by the distribution {name:?}: {reason}")))
}

/// Returns the refusal of a distribution for a join on one device.
pub(crate) fn needs_several_devices(distribution: Distribution) -> Error {
    Error::Invalid(format!(
        "the distribution {:?} divides a join among several devices, and one device would run this join; ask for several with \
         \"devices\", as in \"devices\": 2, or leave \"distribution\" out",
        distribution.name()
    ))
}
