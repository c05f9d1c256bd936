"""What the text of an analysed plan tells: whether everything in it is known to be deterministic.

Classic Spark and Spark Connect both give the text. Catalyst's own notion (``deterministic``) is not in it, and would
not do: it takes every UDF at its word and counts clocks as constants. So the lists here say what is known, and
everything else counts as not deterministic. The functions are listed by the names that Catalyst prints.
"""

from __future__ import annotations

import re
from collections.abc import Collection


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


# Not here: Sample, Limit, Deduplicate and Window depend on the order in which rows happen to come.
_OPERATORS = _words(
    """
    Aggregate CTERelationDef CTERelationRef Distinct Except Expand Filter Generate Intersect Join LocalRelation
    OneRowRelation Project Range RebalancePartitions Relation Repartition RepartitionByExpression ResolvedHint Sort
    SubqueryAlias Union View WithCTE
    """
)
_FUNCTIONS = _words(
    # numbers
    """
    abs acos acosh asin asinh atan atan2 atanh bin bit_count bit_get bround cbrt ceil ceiling conv cos cosh cot csc
    decimal degrees div e exp expm1 factorial floor greatest hex hypot isnan least ln log log10 log1p log2 mod nanvl
    negative pi pmod positive pow power radians rint round sec shiftleft shiftright shiftrightunsigned sign signum sin
    sinh sqrt tan tanh try_add try_divide try_mod try_multiply try_subtract unhex width_bucket
    """
    # logic, casts, nulls, hashes
    """
    atleastnnonnulls between cast coalesce crc32 equal_null hash if ifnull in inset isnotnull isnull knownnotnull
    knownfloatingpointnormalized md5 normalizenanandzero not nullif nullifzero nvl nvl2 sha sha1 sha2 try_cast
    try_to_number to_number xxhash64 zeroifnull
    """
    # text
    """
    ascii base64 bit_length btrim char char_length character_length chr concat concat_ws contains elt endswith
    find_in_set format_number format_string initcap instr lcase left length levenshtein like locate lower lpad ltrim
    mask octet_length overlay parse_url position printf regexp_count regexp_extract regexp_extract_all regexp_instr
    regexp_like regexp_replace regexp_substr repeat replace right rlike rpad rtrim soundex space split split_part
    startswith substr substring substring_index to_binary to_char to_varchar translate trim ucase unbase64 upper
    url_decode url_encode varchar
    """
    # times: clocks are refused by name
    """
    add_months convert_timezone date_add date_diff date_format date_from_unix_date date_part date_sub date_trunc
    dateadd datediff day dayname dayofmonth dayofweek dayofyear extract extractansiintervaldays
    extractansiintervalhours extractansiintervalminutes extractansiintervalmonths extractansiintervalseconds
    extractansiintervalyears from_unixtime from_utc_timestamp gettimestamp hour last_day make_date
    make_dt_interval make_interval make_timestamp make_ym_interval microsecond minute month monthname months_between
    next_day quarter second timestamp_micros timestamp_millis timestamp_seconds to_date to_timestamp
    to_unix_timestamp to_utc_timestamp trunc try_to_date try_to_timestamp unix_date unix_micros unix_millis
    unix_seconds unix_timestamp weekday weekofyear year
    """
    # arrays, structs, maps, and what takes a lambda function
    """
    aggregate array array_append array_compact array_contains array_distinct array_except array_insert
    array_intersect array_join array_max array_min array_position array_prepend array_remove array_repeat array_size
    array_sort array_union arrays_overlap arrays_zip cardinality element_at exists explode explode_outer filter
    flatten forall from_json get get_json_object inline inline_outer json_array_length lambdafunction map
    map_contains_key map_entries map_from_arrays map_from_entries map_keys map_values named_struct namedlambdavariable
    posexplode posexplode_outer reduce reverse sequence size slice sort_array stack struct to_json transform
    try_element_at zip_with
    """
    # aggregates that do not depend on the order of rows, but for the last bits of floating-point sums
    """
    any avg bool_and bool_or corr count count_if covar_pop covar_samp every grouping grouping_id
    kurtosis max mean median min percentile regr_count skewness some std stddev stddev_pop stddev_samp sum try_avg
    try_sum var_pop var_samp variance
    """
)
_CLOCKS = re.compile(r"\b(current_\w+|curdate|now|localtimestamp|_metadata|_nondeterministic)\b|more fields")
_FILES = re.compile(r"\] (parquet|orc|csv|json|text|avro|binaryFile|image|libsvm)$")


def why_not(plan: str, udfs: Collection[str] | None = None) -> str | None:
    """Returns why an analysed plan is not known to be deterministic, None when it is.

    Args:
        plan: its text, as EXPLAIN EXTENDED shows it, after a first line with the schema.
        udfs: names of UDFs in it that were inspected and found deterministic; there are no others then. None: nothing
            is known of UDFs. Python's are shown as ``name(arguments)#id``, like a column that is named so; a name
            that is not in the list is refused.
    """
    operators = plan.partition("\n")[2]
    for line in operators.splitlines():
        text = re.sub(r"^[\s:+|-]*", "", line)
        operator = re.split(r"[\s(]", text, maxsplit=1)[0]
        if operator not in _OPERATORS:
            return f"the operator {operator or line!r} is not known to give the same rows each time"
        if udfs is None and re.search(r"\)#\d", text):
            return f"{operator} has a UDF or a column named like one"
        if operator == "Range":
            text = text.replace("splits=Some(", "")
        if operator == "Relation" and not _FILES.search(text):
            return f"the source {text.rpartition(']')[2].strip() or text!r} does not consist of files"
        # A name ends where no name can go on; so "my-abs(" is not taken for "abs(".
        for name in re.findall(r"([^\s(),\[\]=]+)\(", text):
            name = name.lstrip("-~!").lower()
            if name and name not in _FUNCTIONS and name not in (udfs or ()):
                return f"the function {name} is not known to give the same value each time"
        if _CLOCKS.search(text):
            return f"{operator} reads a clock, or something else that changes"
    return None if operators else "the plan is empty"


def has_files(plan: str) -> bool:
    """Tells whether an analysed plan reads files."""
    return bool(re.search(r"^[\s:+|-]*Relation\b", plan, re.MULTILINE))


def has_local_data(plan: str) -> bool:
    """Tells whether an analysed plan holds local data."""
    return "LocalRelation" in plan
