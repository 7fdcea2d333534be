// Places in the array `settings`, which settings.py fills.
constant constexpr int TEMPERATURE = 0;
constant constexpr int TOP_P = 1; // above 1: off
constant constexpr int LOG_MIN_P = 2; // -infinity: off
constant constexpr int MIN_TOKENS_TO_KEEP = 3;
constant constexpr int TOP_K = 4; // more than there are tokens: off
constant constexpr int XTC_PROBABILITY = 5;
constant constexpr int XTC_THRESHOLD = 6;
constant constexpr int REPETITION_PENALTY = 7;
constant constexpr int PRESENCE_PENALTY = 8;
constant constexpr int FREQUENCY_PENALTY = 9;
// Fed tokens that each penalty looks back on; 0: off.
constant constexpr int REPETITION_CONTEXT = 10;
constant constexpr int PRESENCE_CONTEXT = 11;
constant constexpr int FREQUENCY_CONTEXT = 12;
// Not 0: no filters, where other sequences of the launch have some.
constant constexpr int UNFILTERED = 13;
constant constexpr int SETTINGS = 16; // places in all
