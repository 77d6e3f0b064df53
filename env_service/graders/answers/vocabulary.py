"""The words by which texts name an answer, doubt it, take it back, and say what does not belong to it.

Patterns ignore case. `either` makes one of lines of alternatives; what needs a word's boundary has it in itself.
"""

import re


def either(lines: str) -> str:
    """A pattern of the alternatives on several lines, `|` between those on one."""
    return "(?:" + "|".join(line.strip() for line in lines.strip().splitlines()) + ")"


def words(lines: str) -> str:
    """The same for whole words."""
    return rf"\b{either(lines)}\b"


def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


# ---- an answer ------------------------------------------------------------------------------------------------------

_LATIN_ANSWER = either(r"""
    final[\s_]?answer|answers?|ans|final(?=:)|final (?:result|value|choice|total|solution)|(?:correct|right) (?:choice|option)
    (?:end)?antwort|endergebnis|antwoord|svaret|svar|réponse(?: finale)?|résultat final|respuesta|resultado final|resposta
    risposta
    risultato finale|răspuns(?:ul)?|ответ|відповідь|odpowiedź|odpověď|απάντηση|vastaus|válasz|cevap|yanıt|jawaban(?:nya)?|jibu
    đáp (?:án|số)|câu trả lời|उत्तर|উত্তর|సమాధానం|الإجابة|الجواب|جواب|پاسخ|תשובה
""")
ANSWER = rf"(?:(?<![A-Za-z<\\/]){_LATIN_ANSWER}(?![A-Za-zà-ÿ])|答案|答え|正解|答|정답|답|คำตอบ)"
_IS = either("""
    is|are|was|be|stays|remains
    equals|becomes|comes to|ist|lautet|beträgt|est|es|é|è|este|είναι|to(?! (?:the|this|that|your|our|all|every)\b)
    wynosi|jest|je|är|er|adalah|ialah|ni|là|(?<!depends )on
""")
IS = rf"(?:[:=→⇒]|=>|->|(?<=[\s⟫*])[—–-]\s|(?<=[rRtTnN])'s(?=\s)|(?<![\w']){_IS}(?![^\W\d])|是|为|為|は|은|는|คือ|है|হল|হলো|হচ্ছে|هو|هي|است)"

BEFORE_OTHER_ANSWER = compiled(
    words("""
        explanation of|explains?|express|write|give|round|convert|check|verify|verifying|part of|to find|steps? (?:of|to)|possible
        an
        each|every|wrong|incorrect|other|previous|first|your|[a-z]+'s
        (?:might|may|would|could|initially|first) (?:think|thought|say|guess|assume|believe)(?: that)?
        (?:tempt\\w+|quick|wrong|easy) to|(?:one|you|we|i|some|many|people)(?:'d| might| may| would| could)(?: \\w+ly)?
    """)
    + r" (?:(?:the|our|this|my) )?(?:final |correct )?$"
    + r"|\b(?:number|count|share|fraction|percentage|proportion) of (?:[a-z]+ )?(?:correct |right |wrong )?$"
)
PARTIAL = compiled(
    words("parts?|first|second|step|sub-?question|previous|intermediate|teil|partie|parte")
    + "|"
    + words("could|might|may|not|cannot|never|nicht|kein|pas|no|não|non|не|nie|inte|ikke")
    + r"|n't\b|不|않|아니"
)
"""Words in `the answer to the first part is`, `the answer cannot be`."""
NEGATED = compiled(
    r"\W*(?:not|never|nicht|pas|no|não|non|не|nie|neither|不是)\b[^.\n]*?"
    r"(?:\b(?:but|rather|sondern|sino|mais|mas|ma|а|it is|it's)\b|而是|(?P<none>$))"
)
TAKEN_BACK = compiled(
    r"\b"
    + either("""
        that(?:'s| is| was) (?:wrong|incorrect|not right|not correct|a mistake)|(?:made|making) an? \\w*\\s?(?:mistake|error)
        i (?:misread|miscalculated|misunderstood)
        i (?:forgot|missed|overlooked|left out|mixed up)|scratch that|correction\\b|my mistake|double[- ]counted
        let me (?:redo|recompute|recalculate|re-?do|try again|fix|correct)|that (?:can't|cannot) be (?:right|correct)
        (?:doesn't|does not) (?:seem|look) right|das (?:ist|war) falsch|c'est faux|está mal|è sbagliato
    """)
)
_ASKS = either("""
    (?:next |another )?(?:question|problem|example)|q|instruction|exercise|frage|pregunta|вопрос|问题|問題|문제
""")
QUESTION = re.compile(
    rf"^[ \t*#⟪]*(?:{_ASKS}\s*(?:\d*\s*:|\d+\b)|\\begin\{{(?:prob|exer|quest|example)"
    r"|\d{1,2}[.)] (?=[A-Z])[^\n]*\?)",
    re.IGNORECASE | re.MULTILINE,
)
CHECK = re.compile(
    r"(?:^|(?<=[.!?⟫]) )[ \t*#⟪_]*"
    r"(?:(?:let's|let us|let me|to|we can|you can|we|i'll) (?:quickly )?(?:double[- ]?)?(?:verify|check)\b|(?:a |as a )?(?:quick |sanity "
    r"|as a )(?:check|test)\b|(?:and )?just to be safe\b"
    r"|(?:plug|substitut)\w* (?:\S+ ){0,5}back\b(?=[^\n]*[✓✔✅])|(?:this|that) makes sense\b|indeed\b|(?:this|that"
    r"|it) can be (?:verified|checked)|"
    r"(?:remarks?|notes?|check|proof|discussion|extra|bonus|(?:alternative|other) (?:method|solution|approach))[⟫*_ ]*$|"
    r"verify(?:ing)?⟫?:|verification\b|(?:probe|vérification|comprobación|verifica|controle?|controllo|verificação"
    r"|проверка)⟫?\s?[:.]|proof⟫?[.:]|(?:double[- ]?)?check(?:ing)?\b[^.:=\d\n]{0,40}:)",
    re.IGNORECASE | re.MULTILINE,
)
"""Words before a check of a result that was stated earlier."""
_TRIED = r"(?:it|this|that|these|they|everything|(?:the|our|my) \w+|-?[＄€£]?\d\S*)"
_TRIES = r"(?:confirm|test|verify|check|try|prove|plug|put|substitute|insert|make sure|be sure|see (?:if|whether|that)|run|trace)"
_ASKED = r"(?:check|work|right|correct|fit|match|add|hold|make|satisf|true|plausibl|reasonabl)"
TRIAL = re.compile(
    r"(?:^|(?<=[.!?:⟫]) )[^\w\n]{0,20}(?:(?:so|but|and|ok(?:ay)?|now|well),? )?"
    + either(rf"""
        (?:does|do|did|is|are|will|would) {_TRIED}\b[^.?\n]{{0,40}}\b{_ASKED}\w*[^.?\n]{{0,20}}\?
        (?:works|correct|right|ok|true|makes sense|sounds? right|sure)\?
        (?:let's|let us|let me|i'll|i|i can|we|we can|you can|to|just to) (?:\w+ )?{_TRIES}\b
        (?:confirm|test|verify|check|plugg|putt|substitut|insert|runn|go|work|try|retrac|replay)ing\b
        (?:confirm|test|plug|put|substitute|insert|try) (?:it|this|that|these|-?[＄€£]?\d\S*)\b
        (?:forwards?|backwards?|in reverse|test|trial|proof|confirmation)\b[^.\n:]{{0,20}}:
        we can (?:see|tell|confirm)[^.\n]{{0,30}}\b(?:right|correct|true|works)\b
        (?:this|that|it) (?:is|must be|looks|seems) (?:right|correct|true|confirmed)\b[^.\n]{{0,20}}\b(?:since|because|as|for)\b
        (?:indeed|in fact|sure enough)\b
    """),
    re.IGNORECASE | re.MULTILINE,
)
"""Words with which a text begins to try a result."""
AFFIRMED = compiled(
    r"[✓✔✅☑]|"
    + words(r"""
        checks? out|works?|correct\w*|it (?:is|does)|holds?|yes|yep|yeah|match\w*|true|right|perfect\w*|great|good|agrees?|fits?
        confirm\w*|as (?:given|required|expected|stated|wanted|needed|promised|it should)|satisf\w+|consistent|exactly
        what (?:we|they|the (?:problem|question|story)) (?:were|was|are|is|said|says|told|gave|gives|need\w*|want\w*)
    """)
)
DENIED = compiled(
    words("no|nope|not|but|fails?|wrong|instead|too [a-z]+|off|should (?:be|have)|contradict\\w*") + r"|n't\b"
)
_SENTENCE = r"(?:^|(?<=[.!?⟫]) )[ \t*#⟪_>(-]*"
NEW_QUESTION = re.compile(
    r"(?<!\s)(?:[^\S\n]*+\n){2}\s*+(?!\W*+(?:wait|but|hmm|so|ok|now|hold|would|do|does|is|are|did|have|can|could|shall|let)\b)"
    r"(?=[^\n]*\b(?:how (?:many|much|long|far|old|fast)|what (?:is|was|are)|find|calculate|determine)\b[^\n?]*\?)",
    re.IGNORECASE,
)
"""Words of a paragraph that asks, after an answer."""
RECONSIDERED = compiled(
    r"(?:^|[.!?…—\n(-]\s*+)(?:oh,? |but |hmm+,? |ah,? |ok(?:ay)?,? )?"
    r"(?:wait|hold on|hmm+|oops|actually|no, sorry|sorry|no wait|just kidding|i mean|make that"
    r"|on (?:second thought|reflection)|let me re-?check|re-?(?:checking|counting|reading)|edit(?=:)|that's not right)\b[,:.!]?"
)
"""Words with which a text comes back to an earlier statement."""
COMMENT = re.compile(
    _SENTENCE
    + either("""
        by the way|hope (?:this|that|it) helps|numerically,? (?:this|that|it) is
        fun fact|side note|as an aside|incidentally|p\\.?\\s?s\\b|(?:a )?common (?:mistake|error)
        (?:remark|note|tip|hint|key \\w+|practice|follow-?up|challenge)⟫?:⟫?|don't (?:confuse|forget)\\b
        if you(?:'d| would)? (?:like|want|wish|need|have)\\b|confidence|time taken|steps used
        i(?: am|'m) \\d+ ?% sure|would you like|let me know|(?:this|that) (?:took|kind|type|sort)|(?:this|that|it|\\d+) is also
        here,? we (?:used?|multipl|add|subtract|divid)
        (?:we|you|i) (?:found|got|find|get|obtain) (?:this|it|that)(?: [a-z]+)? by
        (?:this|that|it) (?:comes|follows|results) from
        to (?:get|find) (?:this|that),
        we (?:multiplied|added|subtracted|divided) [^.\n]* to (?:get|find) (?:this|it|that)|this (?:problem|question) is
        that's (?:quite|really|pretty)|(?:source|rating|grading|difficulty|score|level|date|used|time spent|tokens)⟫?:
    """)
    + r"[^\n]*?(?:(?<=[.!?])[*_)⟫]*(?= )|$)",
    re.IGNORECASE | re.MULTILINE,
)
"""A sentence that comments on what was stated before it."""
CLOSING = re.compile(
    r"^[ \t*_]*"
    + either("""
        (?:best|kind|warm)(?: regards| wishes)?,|(?:yours )?sincerely|regards,|cheers,|yours,|love,|posted by|reply\\b
        (?:i )?hope(?![^\\n]{0,80}\\bso\\b[^\\n]{0,80}\\d)
        related\\b|comments?\\b
        i think this is right
        disclaimer|copyright|tags?:|category:
    """),
    re.IGNORECASE | re.MULTILINE,
)
"""Words with which a text takes leave of its reader."""
REFUSAL = compiled(
    r"(?:can't|cannot|can not|could not|couldn't|unable to|not able to|won't|will not|not possible to|impossible to) (?:be )?"
    + words("certain|sure|tell|determined?|answer(?:ed)?|solved?|say|give|know|find|found|calculated?|computed?")
    + r"|(?:not|n't|never) (?:be )?(?:the |our |my )?(?:correct |right |final )?(?:answer|result|solution)\b"
    + r"|\b(?:is|are|was|were)(?:n't| not) (?:given|known|stated|specified|provided)\b|not sure of\b"
    + r"|\b(?:reward of|full credit|rubric)\b|(?:not|n't|n't have) enough information\b|(?:can't|cannot) see\b"
    + r"|\b(?:insufficient|incomplete)\b"
)
"""Words in a sentence that decides on no answer."""
REJECTED = compiled(
    r"\b(?:is|are|was|were|be|were) (?:(?:clearly|definitely|just) )?(?:wrong|incorrect|too (?:few|many|much|little|small|large"
    r"|high|low)|not enough"
    r"|irrelevant)\b|(?:can't|cannot) be (?:right|correct|true)\b|(?:n't|not) (?:work|fit|make sense)|\bno sense\b|\b(?:is|was|are)n't\W*$"
    r"|wrong answer|\bwould (?:answer|say)\b|\bgive up\b"
    r"|,? (?:so|and) (?:so )?(?:to [a-z]+ [^\d]*)?(?:we|i|you) (?:now )?(?:need to|have to|must|divide|multiply|add|subtract)\b[^\d]*$"
)
"""Words in a clause that rejects the number which it names, or says only what to do with it."""
HEDGE = compiled(
    words("""
        either|somewhere|torn between|depend(?:s|ing)|otherwise|vary|or if|or [＄€£]?\\d\\S* if|if not|else it|could argue
        one of these|interpretations?|also (?:be )?(?:possible|right|correct|acceptable)|and/or|if\\b[^.]{0,200}\\bif
        with\\b[^.]{0,200}\\bwithout
        at least [^.]*at most
        (?:but|however|though|or|alternatively),? if (?:\\w+ ){0,2}(?:mean|count|includ|interpret|assum|ignor|exclud)\\w*
        could (?:also )?be|might be|may be|(?<!every )(?<!each )one of(?! the \\d)|not sure|unsure
        can't (?:tell|decide|say)|cannot (?:tell|decide|say)|hard to (?:say|tell)|perhaps|possibly
        (?:is|it's|both are|are (?:both|all)) possible|(?:and|or) \\d\\S*(?: [a-z]+)? are possible|maybe|no idea|i guess
        (?<!\\d )(?:options|choices|candidates)|entweder|vielleicht|könnte|soit\\b.*\\bsoit|pourrait|peut-être|quizás|podría|potrebbe
        forse|talvez
        poderia
        либо|возможно
    """)
    + "|可能|もしくは|かもしれ"
)

OR = r"(?:\b(?:or|oder|ou|o|eller|lub|или|або|veya|hoặc|atau|au)\b|या|أو|或者?|または|か|또는)"
AND = r"(?:\b(?:and|und|et|y|e|en|och|i|и|ve)\b|\bas well as\b|和|と|、)"

# ---- around a result ------------------------------------------------------------------------------------------------

FILLER = either("""
    exactly|about|approximately|approx\\.?|roughly|around|only|just|simply|clearly|still|now|equal to|a total of|the number
    the value
    also|therefore|thus|then|genau|etwa|environ|aproximadamente|cerca de
""")
_COMPARES = either(r"""
    what|the answer|(?:just |more than )?enough|\d[\d./]*%? of\b|[＄€£]?[\d.,]+ [a-z]+ (?:after|before|from|more|less|later|earlier)\b
    (?:[＄€£]?[\d.,]+ )?(?:more|less|fewer|times|not|about|approx\w*|twice|double|triple|half)\b
    [＄€£]?[\d.,]+%?(?: [a-z]+)? (?:[a-z]+er than|rounded)\b
    (?:[a-z]+er|as [a-z]+) (?:than|as)\b
""")
CONCLUSION = compiled(
    r"[,;\s]\s*"
    + either(rf"""
        which is(?: to say)?(?! {_COMPARES})
        so(?! close)|therefore|thus|hence|consequently|(?:shows?|means|tells|implies)(?: us)? that|brings \w+(?: \w+)? to
        (?<=[,;] )now(?= (?:he|she|it|they|we|you|there)\b)|which means|meaning|which gives|settles? on|becomes
        for a total of|which rounds? (?:up |down )?to
        (?<!after )(?<!by )(?<!before )(?:making|leaving|giving)
        i\.e(?=\.,? (?:(?!she|he|they)\w+ ){{0,2}}(?:[-(]?[＄€£]?\d|⟦))(?!\.,? {_COMPARES})
        that is(?! {_COMPARES})(?=,? (?:\w+ )?(?:[＄€£]?\d|⟦))|namely(?=\D*\d[\d.,]*\D*$)|total+ing|donc|por lo tanto|así que
        entonces|quindi|portanto|logo|dus|(?-i:Also)(?!,)|(?<=, )also|deshalb
        daher|поэтому|значит
    """)
    + r"\b|\b(?:and|but) (?:since|as|because) [^,.\n]{1,60},|[∴⇒→]|=>|所以|因此|故|だから|したがって|따라서|그래서"
)
REASON = compiled(
    r",? (?:and (?:this|it|that)|as (?:you|one|we)|which) can (?:easily )?be (?:verified|checked)\b"
    r"|[,\s]\s*(?<!and )(?<!but )(?:because|since|bc|cuz)\b|,\s(?:car|denn|weil|porque|perché|poiché|pois|omdat|want|так как|потому что)\b|"
    r",?\s*\band indeed\b"
    r"|,\s*for (?:they|he|she|it|we|\d\S* ?[-+*/×=])|,\s*(?:where|attained|as (?!a |an |required)|for [a-z] ?=)"
)
ASIDE = compiled(
    r"[,\s]\s*(?<!and )(?<!but )"
    + either(rf"""
        compared (?:with|to)|even though|although|though|whereas|while|rather than|instead of|as opposed to|despite|because|since
        unlike|excluding|including|not counting|ignoring|given that|assuming|considering|if|when
        (?:up|down)(?: [＄€£]?[\d.,]+%?)? from|an? [\d.]+%|(?:an? |one )?(?:half|third|quarter|fifth|tenth) of|versus|vs
        (?:and |but )?not(?! only)|which is (?:just |more than )?enough|enough
        which is (?:more|less|\d[\d.,]*|about|approximately)
        (?:which is|that is|i\.e(?=\.))(?=\.?,? {_COMPARES})|more to|at the beginning
        (?<=, )(?:about|approximately|roughly)(?= [\d.]+%)
        (?<=, )(?:nearly|almost|just (?:under|over))(?= [＄€£]?\d)
        (?<=, )an? (?:saving|discount|reduction|increase|decrease|rise|drop|gain|loss|profit) of(?= [＄€£]?\d[\d.,]*+(?! ?%| percent))
        (?<=, )(?:saving|keeping|having|using|counting)|(?:for|in|of) which|which (?:we|you|one) can|after (?:an?|the)
        (?:after|before|by|without|from) [a-z]+ing|out of(?! [\d,]+ (?:is|equals|makes)\b)|of (?:which|whom)
        \d+ of (?:which|whom|them)
        but(?! (?:now|then|later|today|after|finally|(?:in|at) the end|he|she|it|they|there|we|\d|(?:the|our) [^,;.]*(?:is|are))\b)
        (?:which is |(?<!is )(?<!are ))(?:twice|double|triple|half|(?:\d+|three|four|five|six|ten) times)(?= (?:as|the|her|his|[A-Z]))
        (?<=, )(?:and )?the next (?:one|such|two|three|[a-z]+est)
        or (?:about|approximately|roughly|around)|which (?:was|is) (?:what|the answer)|or \d+ (?:per|a|each)
        (?:is |are |was |well |just |far )?(?:above|below|over|under|within|beyond) the (?:[a-z]+ ){{1,3}}of
        to (?:give|feed|serve|cover|supply|provide) (?=[^.,;]*\d)
        (?<=, )whose|(?<=, )[a-z ]{{3,25}} being
        and (?:so |thus |also |indeed )?(?:satisf\w+|fits?|matche?s?|agrees?)
        (?<=, )(?:das sind|das ist|c'est|soit|ossia)(?= \d[\d.,]* (?:mehr|weniger|de plus|de moins|más|menos|in più|in meno|a mais)\b)
        which (?:appears?|occurs?)|e\.g(?=\.)|obwohl|statt|anstatt|verglichen|(?:und )?nicht|au lieu|comparé|et non|en lugar
        comparado|y no
    """)
    + r"\b|;\s(?=the (?:last|other|[a-z]+th) [^;]*\b(?:will|would|has|is|carries|holds)\b[^;]*\b(?:only|just|partly)\b)"
    r"|;\s(?=[^;]*\bwould\b)|;\s(?=[^;]*\b(?:from now|ago)\b[^;]*\d[^;]*\band\b[^;]*\d)|(?:,? and|,? while|,? whereas"
    r"|,) the (?!total|answer|sum|remain)[a-z\d][^,;.=]{0,40}\bwould\b"
    r"|(?:,|\sor)\s(?:just |only |exactly )?[＄€£]?\d[\d./]*%?(?: [a-z]+){0,2} (?:more|less|fewer|short|shy|from|after|before"
    r"|above|below|later|earlier|of|[a-z]+er than)\b(?! (?:is|was)\b)"
    r"|\s[-–—]\s(?=[＄€£]?\d[\d.,]*%?(?: [a-z]+){0,2} (?:more|less|fewer|[a-z]+er) than\b)"
    r"|;\s(?=(?:their|its) (?:sum|product|difference|quotient|total|average|area|perimeter|volume)\b)"
    r"|\sand [＄€£]?\d[\d.,]*%?(?: [a-z]+)? (?:is|are|was|were|do|does|did|has|have)(?: not|n't)\b"
    + r"|;\s(?:that's|(?:that|this|it) is)(?= "
    + _COMPARES
    + r")|\s[-–—]\s(?=(?:about|around|roughly)\s[＄€£]?\d)|;\s(?:a|the) (?:\w+ )?check\b"
    r"|\s[-–—]\s(?=\d[\d./]*%? of\b|[＄€£]?\d[\d.,]*(?: [a-z]+)? (?:of|at|with|for|divided|times|minus|plus|split)\b)"
    r"|;\s+(?:he|she|\d[\d./]*%? of|it|they|there"
    r"|we) (?:had|was|were)\b"
    + r"|(?<=[a-z]),\s*or\s+[＄€£]?\d|:\s+(?=\D*\d[\d.,]*+\D+\d)|\s-\s?not\b|\s\((?=[^()]*(?:[A-Za-z]{2}|[-+*/×=]))"
)
_DETERMINERS = (
    "the|an?|his|her|their|its|all|these|those|about|only|another|initial|original|first|last|next|den|les|des|los|las"
)
GOVERNED = compiled(
    r"\b"
    + either(r"""
        after|before|than|per|from|during|within|despite|except|unlike|since|until|including|the|(?<!in )all|day|age|grade|year|number
        step|week|chapter|page|question|problem|part|line|level|tag|jour|día|of (?:the|his|her|their|its|all|our|those|these)
        (?<=[\d%] )(?:out )?of|(?:divid|multipl)(?:e|ed|y|ied|ing|ying)(?: [a-z]+){0,4} by|on top of|(?:class|group|set) of|as [a-z]+ as
        \d\s[a-z]+ of|choose|pick|select|the (?:initial|original)
        (?<!need )(?<!needs )(?<!has )(?<!have )(?<!had )(?<!able )(?<!going )(?<!gets )to (?!be |get |have |equal |leave |give )[a-z]{3,}
        (?<=to )[a-z]{3,} (?:up|back|off)
        (?:from|than|after|before|out of) (?:the|its|an?|his|her|their) (?:[a-z]+ ){1,3}of|(?:short|shy) of
        to (?:get|come|go|make it|climb|rise|move) (?:up |back )?to
        (?:takes?|needs?) (?:[a-z]+ )?[\d.,]+ (?!away|off)[a-z]+ to get|(?:goal|target) of
        nach|vor|(?:après|avant|después|antes|depois)(?: avoir)?(?: de)?(?: \w+)?|dopo|na|после
    """)
    + rf"(?:\s+(?:{_DETERMINERS})){{0,3}}\s+[＄€£]?$"
)
"""Words before a number that is a circumstance: `after 3 weeks`, `of the 72 students`, `on day 4`, `to make 16 muffins`."""
TERM = compiled(
    r"\b(?:after|before|within|until|during|year|day|week|page|age|grade|level|chapter|floor)(?: about| only| another)?\s+[＄€£]?$"
)
"""Words before a number that is a result if there is no other: `full after 8 hours`."""
SOFT = compiled(
    r"\b(?:(?<!bring )(?<!brings )in|for|over|each|every|on|(?<!arrive )(?<!arrives )at|per|into|among|(?:at|over) (?:an?"
    r"|the) (?:[a-z]+ ){1,3}of|appears?|occurs?"
    r"|(?<=[a-z] )(?<!is )(?<!are )(?<!was )(?<!were )(?:working|driving|running|walking|using|buying|selling|saving|going)"
    r"|(?<!left )(?<!up )(?<!ends )(?<!him )(?<!her )(?<!them )with"
    r"|für|je|mit|bei|pro|von|auf|pour|en|dans|avec|pendant|sur|(?<=[a-z] )(?<!\bes )(?<!\best )de|del|du|o"
    r"|para|con|por|em|su|di|за|в|на|из|w|za|z|på|trong|dalam|voor|для|dla|för|için)"
    r"(?:\s+(?:a|all|about|las|los|les|den)|\s+(?:the|his|her|their|its|these|those)(?:\s[a-z]+)?){0,2}\s+[＄€£]?$"
)
"""Words before a number that is a circumstance if there is another: `$20 for 5 books`."""
CIRCUMSTANCE = compiled(
    r"(?:[\W_]*(?:so|therefore|thus|hence|finally|and|but|now|then|also|donc|por lo tanto),?\s)?"
    r"(?:(?:if|when|given|once|since|because|as|[a-z]{2,}ing)\s[^,;:=.]*\d(?:[^,;:=.]|[.,](?=\d))*"
    r"|(?:with|out of|of|in|on|at|by|after|before|from|between|during|within|for|to|using|among|de|sur|von|nach|bei|mit|après|avec|dans"
    r"|tra|su|con|din|z|из)\s(?:(?!\b(?:he|she|it|they|we|you|there|is|are|was|will|has|have|had)\b)[^,;:=.])*)(?<=[\w%]),\s+"
)
"""Beginning of a sentence that states nothing: `Out of 40 students, `."""
TOTAL = compiled(
    words("in total|altogether|in all|all together|total of|grand total|insgesamt|en total|en tout|in totale|no total")
)
ADDRESS = compiled(words("i'll|i can|want me|would you|do you|shall (?:i|we)|try|post|remember|note"))
"""Words in a sentence to the reader, or on another matter: it states no result."""
SUMMARY = compiled(
    words("""
    totals?|sum|answer|result|final|remain\\w*|left|profit|change|average|mean|difference|all|together|overall|net|gesamt\\w*
    summe
    rest|so|therefore|totale|result\\w*|reste|restant
""")
)
"""Words in the name of a value that others lead to."""
CUE = compiled(
    SUMMARY.pattern
    + "|"
    + words("thus|hence|finally|altogether|also|donc|entonces|quindi|portanto")
    + r"|[:=→∴\]]|[-=]>"
)
"""Words before the result of a line without a full stop."""
SETUP = compiled(
    r"[\W_]*(?:first|next|now)?,?\s*(?:let (?!me\b)|let's (?:say|assume|suppose)\b|say,? (?:each|there|that|he|she|we)\b|given\s?:"
    r"|suppose|assume|consider|recall|remember|note that|for (?:example|instance)\b|(?:because|since)\b[^,:]*$"
    r"|the (?:problem|question) (?:says|states|gives|tells|(?:asks|is about)(?![^\n]*(?::|which is|, so)))"
    r"|this (?:problem|question) is about"
    r"|we (?:are|were) (?:told|given|asked(?![^\n]*:))|this is (?:problem|question|exercise)\b|sorry,? (?:but|i (?:can|could|do|am))\b"
    r"|(?:print\b(?!.*#.*\d)|return\b(?!\s*-?\d[\d.]*\s*$)|def\b|import\b))"
)
"""Beginning of a sentence that says what is known or asked."""
TASK = compiled(
    r"(?:[\W_]*(?:(?:first|next|then|now|so|just|simply|hint|start by|to [^,]*(?=,))[,:]?\s)*|[^,]*, (?:and|but|then) "
    r"|[\W_]*step \d+\W+)"
    r"(?:(?:we|i|you)?(?:'ll)? ?(?:first |now |then )?(?:need|have|want|must|should)(?: to)? "
    r"|(?:we|you) |let(?:'s| us| me) (?:first |now |then )?|)"
    r"(?:comput|calculat|find|determin|solv|multipl|divid|add|subtract)(?:e|y|y?ing"
    r"(?![^,]*, (?:[A-Z][a-z]+|he|she|it|they|we|you)\b(?! (?:must|need|have to|should)\b)[^,]*\d))?\b"
    r"(?!.*(?:[=:]|\b(?:is|(?<!there )are|gets?|gives?|giving|obtain|equals|makes?|yields?|leaves?|so|(?:you|we)(?:'ll"
    r"| will)? (?:find|see|have|arrive))\b)(?=.*[\d⟦]))"
)
"""Beginning of a sentence that says what is to be done, without its result."""
REFUSED = compiled(
    r"\b(?:not|cannot|never|nicht|kein|pas|no|não|non|не|than)(?: (?:be|is|es|est|ist|the|equal|to|exactly))*\s+[＄€£⟦⟪]?$"
    r"|n't(?: be)? [＄€£⟦⟪]?$|不是\s*$"
)
"""Words before a number that is said not to be the result."""
ACTS = re.compile(
    r"\b(?:giv(?:es?|ing|en)|gave|sells?|sold|selling|buys?|bought|buying|spends?|spent|los(?:es?|t|ing)|eats?|ate|eaten|gets?|got|receiv\w+"
    r"|finds?|found|adds?|added|adding|tak(?:es?|ing)|took|us(?:es?|ed)|remov\w+|pays?|paid|donat\w+|puts?|return\w*|br(?:eaks?|oke)"
    r"|leaves?|arriv\w+|joins?|joined|shar(?:es?|ed)|then|after|afterwards|next|now|later|finally|another|more|answer|altogether"
    r"|costs?|needs?)\b",
    re.IGNORECASE,
)
"""Words of what changes a quantity, or comes next."""
GIVES_AWAY = re.compile(
    r"\b(?:giv(?:es?|ing)|gave|sells?|sold|eats?|ate|los(?:es?|ing|t)|spen(?:ds?|t)|uses?|used|donat\w+|throws?|threw)\b"
    r"[^.]*\b(?:has|have|had|is|are|keeps?|kept)\b",
    re.IGNORECASE,
)
"""Words of what is given away, before what is left."""
THAT_IS = re.compile(
    r"\W*(?:(?:that|this|it)(?:'s| is| was| will be|'ll be)|(?P<time>(?:by|at) (?:then|that (?:time|point|moment))))\b",
    re.IGNORECASE,
)
"""Words for the result of the sentence before."""
STILL = compiled(words("still|left(?![ -](?:part|side|hand)\\b)|remain\\w*"))
"""Words of what is left."""
SEVERAL = compiled(words("solutions?|roots?|values|zeros|intercepts|answers|numbers are|lösungen|soluciones"))

# ---- the end of a text ----------------------------------------------------------------------------------------------

REMARK = compiled(
    r"\b"
    + either("""
        hope|help|let me know|any (?:other|more|further)|question|feel free|would you like|do you|thank|good luck|happy
        does (?:this|that)|verif|check|correct|final|done|isn't (?:it|that|this)|right|easy
    """)
)
UNFINISHED = compiled(words("next|needs? to|have to|let us|let's|we must|we can now|now we|we then|remains to"))
OPEN_WORD = compiled(
    r"\b"
    + either("""
        the|an?|of|to|is|are|was|and|or|by|in|with|for|from|that|then|which|at|on|so|but|as|than|if|we|he|she|they|his|her|their
        has
        have|will|be|were|had|can|not|into|about|after|because|there|this|these|get|gives?|equals|makes?|need|divide|multiply|add|subtract|calculate|compute|find
    """)
    + r"\s*$"
)
ABBREVIATION = compiled(
    r"\b(?:Rs|No|Nr|approx|ca|vs|etc|Eq|Fig|Dr|Mr|Mrs|Ms|St|e\.g|i\.e|Mio|Mrd|bzw)\.$|^\s*\(?\d{1,2}\.$"
)
COMMA_LANGUAGES = compiled(
    words("""
        der|das|und|ist|nicht|für|sind|eine[nrms]?|also|kostet|les|des|une|est|donc|pour|dans|avec|sont|los|las|el|es|il|le|una|ha
        al
        totale|giorn[oi]|por|para|con|que|del|entonces|gli|della|sono|quindi|uma|dos|não|são|então|het|een|voor|zijn|pro|von|mit
        insgesamt|zusammen|stück|woche|kosten|hat|och|är|det|jest|oraz|więc|adalah|dan|jadi|yang|và|là|của|ve|için|toplam
        odpowiedź
        antwort|antwoord|réponse|respuesta|resposta|risposta|svar
    """)
)
"""Common words of languages that write `1.234,56`."""
ENGLISH = compiled(words("the|of|and|is|so|are|has|she|this|with|for|it|that|each|which|there|by"))
